"""Triton kernels of a decode step. Importing one needs Triton, so they are imported where they are launched."""
