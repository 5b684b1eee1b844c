"""The version of tilewise, alone so that any layer may name it."""

VERSION = "0.2.0.dev0"
