"""Groups of ranks: their memory and state, the stores they meet through, and who is alive."""
