// The end of the body of a loop in a graph: says whether the body runs once more.
typedef unsigned long long Handle;

// The driver has it (CUDA 12.4): nothing is linked.
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(Handle loop, unsigned value);

// Host memory is slow to read. Once the node is broken no exchange waits any more, so that the
// iterations between two looks take no time.
const long long ITERATIONS_PER_ABORT_CHECK = 64;

extern "C" __global__ void decide(
    Handle loop, const volatile unsigned char* done, unsigned nbytes, long long* iterations,
    long long at_most, const volatile unsigned long long* abort
) {
    const long long made = ++*iterations;
    bool goes_on = made < at_most;
    for (unsigned i = 0; i < nbytes; ++i)
        if (done[i]) goes_on = false;
    if (goes_on && abort && made % ITERATIONS_PER_ABORT_CHECK == 0 && *abort) goes_on = false;
    cudaGraphSetConditional(loop, goes_on);
}
