"""Convolutions in fp32 by tile registers that multiply bf16 (Intel's AMX)."""
