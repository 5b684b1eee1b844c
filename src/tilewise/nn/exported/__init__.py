"""Planned models as files: a region's program with its plans and filters, written once and loaded by a service."""
