"""What opens a GPU as soon as it is imported, where there is one."""

import torch

torch.cuda.init()
