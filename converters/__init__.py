"""The rooms that call the converter, the quantizer and the bundle builder."""
