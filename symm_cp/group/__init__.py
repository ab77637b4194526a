"""Groups of ranks: their memory and state, their stores, and the liveness of their ranks."""
