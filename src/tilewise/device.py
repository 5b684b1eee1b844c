"""Names and properties of devices, as users import them."""

from __future__ import annotations

from tilewise.machine.device import Environment, device_name, environment, torch_device, total_memory

__all__ = ["Environment", "device_name", "environment", "torch_device", "total_memory"]
