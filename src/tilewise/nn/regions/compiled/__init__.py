"""Planned regions inside ``torch.compile``."""
