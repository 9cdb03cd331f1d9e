"""The transport's Triton kernels. Imported only where triton is.

Offsets come in as named tuples of constants (see ``geometry``), so that a kernel's arguments are few base addresses.
"""
