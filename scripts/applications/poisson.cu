// Conjugate gradients for the 7-point Laplacian on the block of a rank: three kernels in a pass.
//
// A thread has a strip: two cells side by side along the last axis, and some planes of them. Rows
// begin at lines of memory, so that both cells move in one piece; where a row has an odd number of
// cells the second one of its end is read and never written. The ghosts at the edge of the domain
// are zero in every field.
//
// A kernel goes through the block in the direction against that of the one before: so it begins with
// what is still in the cache. What is not needed soon goes past the cache: x, and q when it is read.

struct Grid { // as in poisson.py
    int nx, ny, nz;
    int row, plane; // how far apart neighbors along the other axes are
    int faces;      // of neighbors: bit 2 * axis the low one, the next bit the high one
};

struct State { // as in poisson.py
    double rr, pq;    // r . r and p . q: of this rank where a kernel ends, then of all ranks
    double previous;  // r . r a pass before
    double tolerance; // of |r| / |b|, squared
    double limit;     // of r . r
    long long passes;
    int done, ticket;
};

// As in poisson.py. Planes of a strip: `multiply` has read the next one, others have no use for it.
static const int LANES = 32, ROWS = 8, THREADS = LANES * ROWS, PLANES = 2, MARCH = 8;

struct Strip {
    int cell;   // of the first plane, from the first owned cell
    int i, j, k;
    int planes; // 0 where the thread has none
    int cells;  // of a pair: 1 or 2
};

template <int COUNT> static __device__ Strip my_strip(const Grid &grid, bool is_backward)
{
    Strip mine;
    mine.i = (is_backward ? gridDim.z - 1 - blockIdx.z : blockIdx.z) * COUNT;
    mine.j = blockIdx.y * ROWS + threadIdx.y;
    mine.k = 2 * (blockIdx.x * LANES + threadIdx.x);
    mine.cells = grid.nz - mine.k < 2 ? grid.nz - mine.k : 2;
    mine.planes = grid.nx - mine.i < COUNT ? grid.nx - mine.i : COUNT;
    if (mine.j >= grid.ny || mine.cells <= 0)
        mine.planes = 0;
    mine.cell = mine.i * grid.plane + mine.j * grid.row + mine.k;
    return mine;
}

static __device__ double2 load(const double *cells)
{
    return *reinterpret_cast<const double2 *>(cells);
}

static __device__ double2 load_once(const double *cells)
{
    return __ldcs(reinterpret_cast<const double2 *>(cells));
}

static __device__ void store_once(double *cells, double2 pair, int count)
{
    if (count == 2)
        __stcs(reinterpret_cast<double2 *>(cells), pair);
    else
        __stcs(cells, pair.x);
}

static __device__ void store(double *cells, double2 pair, int count)
{
    if (count == 2)
        *reinterpret_cast<double2 *>(cells) = pair;
    else
        *cells = pair.x;
}

// The sum over the threads of a block, valid in its first thread.
static __device__ double sum_of_block(double mine)
{
    __shared__ double of_warps[THREADS / 32];
    int thread = threadIdx.y * LANES + threadIdx.x;
#pragma unroll
    for (int lane = 16; lane; lane /= 2)
        mine += __shfl_down_sync(~0u, mine, lane);
    if (thread % 32 == 0)
        of_warps[thread / 32] = mine;
    __syncthreads();
    if (thread == 0)
        for (int warp = 1; warp < THREADS / 32; ++warp)
            mine += of_warps[warp];
    return mine;
}

// The sum over all threads, always in the same order: those of a block, then the blocks. True for
// one thread, of the block that comes last; the sum is valid there.
static __device__ bool add_up(double mine, double *of_blocks, int *ticket, double &sum)
{
    __shared__ bool is_last;
    int thread = threadIdx.y * LANES + threadIdx.x;
    int blocks = gridDim.x * gridDim.y * gridDim.z;
    sum = sum_of_block(mine);
    if (thread == 0) {
        of_blocks[(blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] = sum;
        __threadfence();
        is_last = atomicAdd(ticket, 1) == blocks - 1;
    }
    __syncthreads();
    if (!is_last)
        return false;
    __threadfence();
    mine = 0;
    for (int block = thread; block < blocks; block += THREADS)
        mine += __ldcg(of_blocks + block);
    sum = sum_of_block(mine);
    if (thread == 0)
        *ticket = 0;
    return thread == 0;
}

// The fields of the whole block, ghosts and all, before the first pass: it finds p = r.
extern "C" __global__ void begin(const double *b, double *x, double *r, double *p, double *q,
                                 int cells, State *state, double tolerance)
{
    int first = blockIdx.x * blockDim.x + threadIdx.x;
    for (int c = first; c < cells; c += gridDim.x * blockDim.x) {
        x[c] = p[c] = q[c] = 0;
        r[c] = b[c];
    }
    if (first == 0) {
        state->rr = state->pq = state->previous = 1;
        state->tolerance = tolerance;
        state->passes = 0;
        state->done = state->ticket = 0;
    }
}

// r -= alpha q, and r . r of this rank.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    descend(const __grid_constant__ Grid grid, const double *q, double *r, State *state,
            double *of_blocks)
{
    Strip mine = my_strip<PLANES>(grid, state->passes & 1);
    double alpha = state->rr / state->pq, squares = 0, sum;
    double2 rest[PLANES], step[PLANES];
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
        int c = mine.cell + plane * grid.plane;
        if (plane < mine.planes)
            rest[plane] = load(r + c), step[plane] = load_once(q + c);
    }
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
        if (plane >= mine.planes)
            continue;
        rest[plane].x -= alpha * step[plane].x;
        rest[plane].y -= alpha * step[plane].y;
        store(r + mine.cell + plane * grid.plane, rest[plane], mine.cells);
        squares += rest[plane].x * rest[plane].x;
        if (mine.cells == 2)
            squares += rest[plane].y * rest[plane].y;
    }
    // All blocks have read the old values when the last one writes.
    if (add_up(squares, of_blocks, &state->ticket, sum)) {
        state->passes += 1;
        state->previous = state->rr;
        state->rr = sum;
    }
}

// x += alpha p, p = r + beta p, and whether that x is good enough.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    turn(const __grid_constant__ Grid grid, const double *r, double *p, double *x, State *state)
{
    Strip mine = my_strip<PLANES>(grid, state->passes & 1);
    double alpha = state->previous / state->pq, beta = state->rr / state->previous;
    double2 way[PLANES], at[PLANES], rest[PLANES];
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
        int c = mine.cell + plane * grid.plane;
        if (plane < mine.planes)
            way[plane] = load(p + c), rest[plane] = load(r + c), at[plane] = load_once(x + c);
    }
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
        int c = mine.cell + plane * grid.plane;
        if (plane >= mine.planes)
            continue;
        at[plane].x += alpha * way[plane].x;
        at[plane].y += alpha * way[plane].y;
        way[plane].x = rest[plane].x + beta * way[plane].x;
        way[plane].y = rest[plane].y + beta * way[plane].y;
        store_once(x + c, at[plane], mine.cells);
        store(p + c, way[plane], mine.cells);
    }
    if (mine.cell == 0 && mine.planes) {
        if (state->passes == 1)
            state->limit = state->tolerance * state->rr;
            // Stays: the residual may grow again. Also where it is not a number.
        if (!(state->rr > state->limit))
            state->done = 1;
    }
}

// p = r + beta p for the ghosts beside a strip. A ghost has one cell beside it, and so one thread.
static __device__ void turn_ghosts(const Grid &grid, const Strip &mine, const double *r, double *p,
                                   double beta)
{
    int faces = grid.faces, plane = grid.plane, row = grid.row, c = mine.cell;
    int end = c + mine.planes * plane, last = mine.i + mine.planes == grid.nx;
    for (int i = 0; i < mine.cells; ++i) {
        if (faces & 1 && mine.i == 0)
            p[c - plane + i] = r[c - plane + i] + beta * p[c - plane + i];
        if (faces & 2 && last)
            p[end + i] = r[end + i] + beta * p[end + i];
        for (; c != end; c += plane) {
            if (faces & 4 && mine.j == 0)
                p[c - row + i] = r[c - row + i] + beta * p[c - row + i];
            if (faces & 8 && mine.j == grid.ny - 1)
                p[c + row + i] = r[c + row + i] + beta * p[c + row + i];
        }
        c = mine.cell;
    }
    for (; c != end; c += plane) {
        if (faces & 16 && mine.k == 0)
            p[c - 1] = r[c - 1] + beta * p[c - 1];
        int high = c + mine.cells;
        if (faces & 32 && mine.k + mine.cells == grid.nz)
            p[high] = r[high] + beta * p[high];
    }
}

// The ghosts of p, q = A p, and p . q of this rank. Nothing else has the memory of q, so that the
// cells of the next planes may be on their way while those of one are stored.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    multiply(const __grid_constant__ Grid grid, const double *r, double *p, double *__restrict__ q,
             State *state, double *of_blocks)
{
    Strip mine = my_strip<MARCH>(grid, !(state->passes & 1));
    double product = 0, sum;
    int c = mine.cell, two = mine.cells, plane = grid.plane, row = grid.row;
    if (mine.planes) {
        if (grid.faces)
            turn_ghosts(grid, mine, r, p, state->rr / state->previous);
        double2 below = load(p + c - plane), here = load(p + c);
#pragma unroll
        for (int step = 0; step < MARCH; ++step, c += plane) {
            if (step >= mine.planes)
                break;
            double2 above = load(p + c + plane);
            double2 front = load(p + c - row), back = load(p + c + row), out;
            double west = p[c - 1], east = p[c + two];
            out.x = 6 * here.x - below.x - above.x - front.x - back.x - west;
            out.x -= two == 2 ? here.y : east;
            out.y = 6 * here.y - below.y - above.y - front.y - back.y - here.x - east;
            store(q + c, out, two);
            product += here.x * out.x;
            if (two == 2)
                product += here.y * out.y;
            below = here;
            here = above;
        }
    }
    if (add_up(product, of_blocks, &state->ticket, sum))
        state->pq = sum;
}
