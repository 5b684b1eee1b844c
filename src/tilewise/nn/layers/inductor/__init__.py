"""Convolutions with what surrounds them, in graphs that Inductor has frozen on a CPU."""
