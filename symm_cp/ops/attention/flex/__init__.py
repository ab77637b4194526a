"""Flex attention over ranks: any `mask_mod` and `score_mod`, evaluated tile by tile."""
