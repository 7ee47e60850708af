#include <mpishare.cuh>

// No product is added to anything here but to the sum, so that the compiler has nothing to fuse and
// the fields are NumPy's to the last bit.
typedef Group<float> Cells;

// Of a row and its neighbors; the next row but one is on its way while a row is computed.
template <bool is_summed>
static __device__ double relax_strip(const float *u, float *v, int plane, Strip mine)
{
    double squares = 0;
    if (!mine.count)
        return squares;
    int c = mine.cell;
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
    relax_strip<false>(u, v, boxes.plane, my_strip<Cells::N>(boxes));
}

// Adds the squares of a block's changes to `sum`.
static __device__ void add_up(double squares, double *sum)
{
    __shared__ double of_warps[1024 / 32];
    for (int lane = 16; lane; lane /= 2)
        squares += __shfl_down_sync(~0u, squares, lane);
    if (threadIdx.x % 32 == 0)
        of_warps[threadIdx.x / 32] = squares;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < blockDim.x / 32; ++warp)
            squares += of_warps[warp];
        atomicAdd(sum, squares);
    }
}

// The same, and the squares of the changes are added to `sum`.
extern "C" __global__ void __launch_bounds__(256, 4)
    relax_and_sum(const float *u, float *v, const __grid_constant__ Boxes boxes, double *sum)
{
    add_up(relax_strip<true>(u, v, boxes.plane, my_strip<Cells::N>(boxes)), sum);
}

// Many steps in one launch. Each block has some rows of the rank, and four neighbors: blocks of this
// rank or of others, which it signals after each step, once their ghosts have its cells. A block
// that has the signals of step k makes step k + 1, which overwrites what step k has read.
struct March {
    long long fields[2];  // where in the window the first cell, a ghost, of each is
    long long before;     // steps before this launch
    int plane, rows, columns;
    int per_block, depth; // rows of a block, and of a strip
    int steps;
    int sides[4];         // the ranks above, below, on the left and on the right, or -1
};

extern "C" __global__ void __launch_bounds__(512)
    relax_steps(mpishare::Device d, const __grid_constant__ March m, double *sum)
{
    enum { UP, DOWN, LEFT, RIGHT };
    const int N = Cells::N;
    const int begin = 1 + blockIdx.x * m.per_block, left_over = m.rows + 1 - begin;
    const int rows = left_over < m.per_block ? left_over : m.per_block;
    const int groups = (m.columns + N - 1) / N, last = gridDim.x - 1;
    // One thread each of four warps sees to a side.
    const int side = threadIdx.x / 32;
    int rank = -1, block = blockIdx.x;
    if (threadIdx.x % 32 == 0 && side < 4) {
        rank = m.sides[side];
        if (side == UP)
            block ? rank = d.rank, --block : block = last;
        else if (side == DOWN)
            block < last ? rank = d.rank, ++block : block = 0;
    }
    for (int k = 0; k < m.steps; ++k) {
        const bool ok = rank < 0 || mpishare::wait(d, rank, 4 * blockIdx.x + side, m.before + k);
        if (!__syncthreads_and(ok))
            return;
        const float *u = mpishare::at<float>(d, d.rank, m.fields[k % 2]);
        float *v = mpishare::at<float>(d, d.rank, m.fields[1 - k % 2]);
        const bool is_summed = sum && k == m.steps - 1;
        double squares = 0;
        for (int i = threadIdx.x;; i += blockDim.x) {
            const int row = i / groups * m.depth, across = i % groups * N;
            if (row >= rows)
                break;
            Strip mine = {(begin + row) * m.plane + 1 + across, m.depth, 0, m.columns - across};
            mine.count = rows - row < m.depth ? rows - row : m.depth;
            mine.end = mine.end < N ? mine.end : N;
            if (is_summed)
                squares += relax_strip<true>(u, v, m.plane, mine);
            else
                relax_strip<false>(u, v, m.plane, mine);
        }
        __syncthreads();
        const long long there = m.fields[1 - k % 2];
        if (blockIdx.x == 0 && m.sides[UP] >= 0)
            mpishare::put<mpishare::block>(d, m.sides[UP], there + (m.rows + 1) * m.plane + 1,
                                           v + m.plane + 1, m.columns);
        if (blockIdx.x == last && m.sides[DOWN] >= 0)
            mpishare::put<mpishare::block>(d, m.sides[DOWN], there + 1,
                                           v + m.rows * m.plane + 1, m.columns);
        for (int r = begin + threadIdx.x; r < begin + rows; r += blockDim.x) {
            if (m.sides[LEFT] >= 0)
                *mpishare::at<float>(d, m.sides[LEFT], there + r * m.plane + m.columns + 1) =
                    v[r * m.plane + 1];
            if (m.sides[RIGHT] >= 0)
                *mpishare::at<float>(d, m.sides[RIGHT], there + r * m.plane) =
                    v[r * m.plane + m.columns];
        }
        __syncthreads();
        if (rank >= 0)
            mpishare::signal(d, rank, 4 * block + (side ^ 1), m.before + k + 1);
        if (is_summed)
            add_up(squares, sum);
    }
}
