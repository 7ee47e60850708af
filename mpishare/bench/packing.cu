// Packs the boxes of a halo exchange into one buffer, and unpacks them: a row of blocks per box.
//
// A box is n0 * n1 * n2 words of a field, the last axis fastest; its words lie in the buffer from
// `first` on.

struct Box {
    unsigned long long *cells;
    long long first, n0, n1, n2, s0, s1, s2;
};

static __device__ unsigned long long *cell(const Box &box, long long i)
{
    long long k = i % box.n2, rest = i / box.n2;
    return box.cells + rest / box.n1 * box.s0 + rest % box.n1 * box.s1 + k * box.s2;
}

extern "C" __global__ void pack(unsigned long long *buffer, const Box *boxes)
{
    const Box box = boxes[blockIdx.y];
    const long long count = box.n0 * box.n1 * box.n2, step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step)
        buffer[box.first + i] = *cell(box, i);
}

extern "C" __global__ void unpack(const unsigned long long *buffer, const Box *boxes)
{
    const Box box = boxes[blockIdx.y];
    const long long count = box.n0 * box.n1 * box.n2, step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step)
        *cell(box, i) = buffer[box.first + i];
}
