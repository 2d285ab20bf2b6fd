"""JAX as these tests want it: on four devices of the CPU, compiling quickly rather than well, which is most of their time."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
                                   "--xla_llvm_disable_expensive_passes=true")
