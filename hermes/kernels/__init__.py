"""Loops over weights as machine code, made for this processor when they are first called.

What takes numpy a dozen passes over memory is one pass here, in registers, and without Python's
lock, so threads work side by side. LLVM is only asked to choose instructions: additions and
multiplications are done in the order written and never contracted, so every processor gets the same
bits. A kernel is ready in some ten milliseconds; nothing is kept on disk.
"""
