"""Published figures of devices that targets run on."""

from __future__ import annotations

# Memory bandwidth in GB/s, dense 16-bit TFLOP/s, memory in GB: vendors' data sheets; CPUs and
# unified memory: typical.
DEVICES = {
    "h100": (3350, 989, 80),  # SXM
    "h200": (4800, 989, 141),
    "a100": (2039, 312, 80),  # SXM
    "a100-40": (1555, 312, 40),  # SXM
    "l4": (300, 121, 24),
    "rtx3090": (936, 71, 24),
    "rtx4090": (1008, 165, 24),
    "m3max": (400, 28, 128),
    "m2ultra": (800, 54, 192),
    "cpu-desktop": (80, 1.5, 64),  # two channels of DDR5, AVX2
    "cpu-server": (300, 20, 512),  # eight channels of DDR5, AMX
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
