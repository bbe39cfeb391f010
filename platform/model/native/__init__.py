"""The native executor: a decoder as a list of instructions that C++ runs in one call a step."""
