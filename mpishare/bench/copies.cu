// Copies boxes of cells, each from strides to strides: a row of blocks per box, see copies.py.

struct Box {
    char *to;
    const char *from;
    long long n[4], to_step[4], from_step[4]; // extents in cells, steps in bytes
};

template <typename Cell> static __device__ void copy(const Box *boxes)
{
    const Box box = boxes[blockIdx.y];
    const unsigned n1 = box.n[1], n2 = box.n[2], n3 = box.n[3], count = box.n[0] * n1 * n2 * n3;
    const unsigned step = gridDim.x * blockDim.x;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        const unsigned i3 = i % n3, row = i / n3, i2 = row % n2, plane = row / n2;
        const long long at[4] = {plane / n1, plane % n1, i2, i3};
        long long to = 0, from = 0;
        for (int axis = 0; axis < 4; axis++) {
            to += at[axis] * box.to_step[axis];
            from += at[axis] * box.from_step[axis];
        }
        *(Cell *)(box.to + to) = *(const Cell *)(box.from + from);
    }
}

extern "C" __global__ void copy8(const Box *boxes) { copy<unsigned long long>(boxes); }
extern "C" __global__ void copy16(const Box *boxes) { copy<ulonglong2>(boxes); }
