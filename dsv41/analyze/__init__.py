"""`dsv41 analyze`: cache bytes, FLOPs, prefill cost, parameters and memory, by formula and counted from this code."""
