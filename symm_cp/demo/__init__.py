"""The main job of `symm-cp demo`: a transformer trained three ways, compared."""
