"""The verification ladder: metrics, feeding plans and rungs over runner interfaces."""
