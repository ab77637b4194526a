"""The folder that `symm-cp run` puts first in `PYTHONPATH`, for its `sitecustomize.py`."""
