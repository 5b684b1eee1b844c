"""What layers given as text say, read without torch: numbers and words, and one clear error where there are none.

The ``notation`` module of each kind of problems makes problems of them. The command line asks here first, so that a
misspelt layer is an error at once.
"""
