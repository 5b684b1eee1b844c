"""Whole models over several devices of one process: every batch is cut by planned shares."""
