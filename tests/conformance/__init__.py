"""What "a transport works" means: one suite that runs against any transport by its registry name.

    pytest tests/conformance                               # every transport that is available here
    pytest tests/conformance --transports shm,torch_dist   # these, and it is a failure if one is not available
    MOEFLEET_TRANSPORTS=mine pytest tests/conformance --device cuda
    pytest tests/conformance --transports torch_dist --ranks 2

Ranks are processes of this machine: four at most, and on GPUs no more than there are GPUs where two ranks cannot have
one together (NCCL refuses that). What needs more is skipped with that reason. Inputs are made from seeds on each rank,
results come back by value, and the parent compares them with :mod:`moefleet.reference`. A test that needs what a
transport's ``Capability`` does not offer (a feature, or sizes outside its limits) is skipped with that reason;
``transports.py`` lists the words. A run of the suite in which no transport carried a single step fails.

"case N" in a docstring counts the public reports of what users of expert parallelism have hit; the words beside it say
what went wrong there.
"""
