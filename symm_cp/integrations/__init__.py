"""Other libraries' models on symm_cp, through these libraries' own extension points.

Each is imported only when asked for, and needs the library that it is named after.
"""
