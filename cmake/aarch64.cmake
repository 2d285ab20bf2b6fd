# Cross-compiles for aarch64 with Debian's compiler and runs what it makes under qemu-user. Libraries are Debian's packages
# for arm64, the C library among them, which lie beside the native ones: the emulator needs no other root.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64)
