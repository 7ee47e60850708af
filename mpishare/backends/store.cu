// Stores one 8-byte value: the live probe's question whether a kernel reaches another rank's memory.
extern "C" __global__ void store(unsigned long long* target, unsigned long long value) {
    *reinterpret_cast<volatile unsigned long long*>(target) = value;
}
