// No product is added to anything here but to the sum, so that the compiler has nothing to fuse and
// the fields are NumPy's to the last bit.
typedef Group<float> Cells;

// Of a row and its neighbors; the next row but one is on its way while a row is computed.
template <bool is_summed>
static __device__ double relax_strip(const float *u, float *v, const Boxes &boxes)
{
    Strip mine = my_strip<Cells::N>(boxes);
    double squares = 0;
    if (!mine.count)
        return squares;
    int c = mine.cell, plane = boxes.plane;
    Cells above = load(u + c - plane), here = load(u + c), below = load(u + c + plane);
#pragma unroll 4
    for (int left = mine.count; left; --left, c += plane) {
        Cells ahead = left > 1 ? load(u + c + 2 * plane) : below, next;
        float west = u[c - 1], east = u[c + Cells::N];
#pragma unroll
        for (int i = 0; i < Cells::N; ++i) {
            float before = i ? here.at[i - 1] : west;
            float after = i < Cells::N - 1 ? here.at[i + 1] : east;
            next.at[i] = 0.25f * (above.at[i] + below.at[i] + before + after);
            if (is_summed && mine.begin <= i && i < mine.end) {
                double change = next.at[i] - here.at[i];
                squares += change * change;
            }
        }
        store(v + c, next, mine);
        above = here;
        here = below;
        below = ahead;
    }
    return squares;
}

extern "C" __global__ void __launch_bounds__(256, 4)
    relax(const float *u, float *v, const __grid_constant__ Boxes boxes)
{
    relax_strip<false>(u, v, boxes);
}

// The same, and the squares of the changes are added to `sum`.
extern "C" __global__ void __launch_bounds__(256, 4)
    relax_and_sum(const float *u, float *v, const __grid_constant__ Boxes boxes, double *sum)
{
    __shared__ double of_warps[256 / 32];
    double squares = relax_strip<true>(u, v, boxes);
    for (int lane = 16; lane; lane /= 2)
        squares += __shfl_down_sync(~0u, squares, lane);
    if (threadIdx.x % 32 == 0)
        of_warps[threadIdx.x / 32] = squares;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < 256 / 32; ++warp)
            squares += of_warps[warp];
        atomicAdd(sum, squares);
    }
}
