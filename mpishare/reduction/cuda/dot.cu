// The dot product over all ranks in one launch: each block sums its elements, the last one that
// comes to its end folds the blocks in their order and goes on to the other ranks, by LL.
//
// The order of all sums depends on the number of elements, of blocks and of ranks alone. The buffer
// between ranks is as in small.cu, with one element; only the last block waits for other ranks.
#include "ll_fold.cuh"

// A block is one warp where that is enough. A thread has so many elements in flight:
const int MAX_THREADS = 512, IN_FLIGHT = sizeof(Number) > 8 ? 4 : 8;

// The type of a rank's own sum.
template <class T>
struct Sum {
    T total = {};
    __device__ __forceinline__ void add_product(T x, T y) { total = static_cast<T>(total + x * y); }
    __device__ __forceinline__ void add(const Sum& other) {
        total = static_cast<T>(total + other.total);
    }
    __device__ __forceinline__ T value() const { return total; }
};

template <>
__device__ __forceinline__ void Sum<float>::add_product(float x, float y) {
    total = fmaf(x, y, total);
}

template <>
__device__ __forceinline__ void Sum<double>::add_product(double x, double y) {
    total = fma(x, y, total);
}

template <class Format>
struct Sum<Narrow<Format>> {
    float total = 0;
    __device__ __forceinline__ void add_product(Narrow<Format> x, Narrow<Format> y) {
        total = fmaf(x.value(), y.value(), total);
    }
    __device__ __forceinline__ void add(const Sum& other) { total += other.total; }
    __device__ __forceinline__ Narrow<Format> value() const { return Narrow<Format>::of(total); }
};

template <class Real>
struct Sum<Complex<Real>> {
    Complex<Real> total = {};
    __device__ __forceinline__ void add_product(Complex<Real> x, Complex<Real> y) {
        total.re = fma(x.re, y.re, fma(x.im, y.im, total.re));
        total.im = fma(x.re, y.im, fma(-x.im, y.re, total.im));
    }
    __device__ __forceinline__ void add(const Sum& other) { total = total + other.total; }
    __device__ __forceinline__ Complex<Real> value() const { return total; }
};

typedef Sum<Number> Partial;

__device__ __forceinline__ Partial of_partner(const Partial& mine, int lanes) {
    const int words = (sizeof(Partial) + 3) / 4;
    unsigned word[words] = {};
    memcpy(word, &mine, sizeof mine);
#pragma unroll
    for (int k = 0; k < words; ++k) word[k] = __shfl_xor_sync(~0u, word[k], lanes);
    Partial other;
    memcpy(&other, word, sizeof other);
    return other;
}

// The sum over a block, in the first thread at least: partners add the same two numbers.
__device__ Partial sum_of_block(Partial mine) {
    __shared__ Partial of_warp[MAX_THREADS / 32];
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) mine.add(of_partner(mine, lanes));
    if (blockDim.x == 32) return mine;
    __syncthreads(); // the last sum has been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x < 32) {
        mine = threadIdx.x < blockDim.x / 32 ? of_warp[threadIdx.x] : Partial();
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) mine.add(of_partner(mine, lanes));
    }
    return mine;
}

// Adds the products of elements i, i + step, ...; all loads before the sums.
template <bool ARE_THERE>
__device__ __forceinline__ void add_products(
    Partial* sums, char* x, char* y, const Shape& of_x, const Shape& of_y, Word i, Word step,
    Word count
) {
    Number *at[2][IN_FLIGHT], a[IN_FLIGHT], b[IN_FLIGHT];
    elements({x, y}, {&of_x, &of_y}, i, step, at);
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
        const bool is_there = ARE_THERE || i + k * step < count;
        a[k] = is_there ? *at[0][k] : Number();
        b[k] = is_there ? *at[1][k] : Number();
    }
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) sums[k].add_product(a[k], b[k]);
}

__device__ __forceinline__ Partial sum_of_elements(
    char* x, char* y, const Shape& of_x, const Shape& of_y, Word count
) {
    Partial sums[IN_FLIGHT];
    const Word step = static_cast<Word>(gridDim.x) * blockDim.x;
    Word i = static_cast<Word>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + (IN_FLIGHT - 1) * step < count; i += IN_FLIGHT * step)
        add_products<true>(sums, x, y, of_x, of_y, i, step, count);
    if (i < count) add_products<false>(sums, x, y, of_x, of_y, i, step, count);
#pragma unroll
    for (int width = IN_FLIGHT / 2; width; width /= 2)
#pragma unroll
        for (int k = 0; k < width; ++k) sums[k].add(sums[k + width]);
    return sums[0];
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) dot(
    const __grid_constant__ Peers peers, const __grid_constant__ Shape of_x,
    const __grid_constant__ Shape of_y, char* x, char* y, Number* out, Word count,
    Partial* of_blocks, int me, State* state, const __grid_constant__ Host host
) {
    __shared__ bool is_last;
    const Word epoch = epoch_of(state); // early; the last block alone raises it
    Partial sum = sum_of_block(sum_of_elements(x, y, of_x, of_y, count));
    if (gridDim.x > 1) {
        if (threadIdx.x == 0) {
            of_blocks[blockIdx.x] = sum;
            __threadfence();
            is_last = atomicAdd(&state->tickets, 1) == gridDim.x - 1;
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        Partial of_thread;
        for (unsigned block = threadIdx.x; block < gridDim.x; block += blockDim.x) {
            Partial other;
            memcpy(&other, of_blocks + block, sizeof other);
            of_thread.add(other);
        }
        sum = sum_of_block(of_thread);
    }
    if (threadIdx.x) return;
    Number total = sum.value();
    bool is_whole = true;
    if (RANKS > 1 && me >= 0) { // else: of one rank, or to load
        const Word flag = epoch << 32, here = (epoch & 1) * RANKS * Words::COUNT;
        const Words mine = Words::of(total);
        send_to_ranks(mine, peers, me, here + me * Words::COUNT, flag);
        const Word* from = reinterpret_cast<const Word*>(peers.at[me]) + here;
        Wait wait(host, &state->aborted, epoch);
        is_whole = fold_ranks<Fold>(mine, from, Words::COUNT, me, flag, wait, total);
        wait.end(RANKS);
    }
    if (is_whole) *out = total;
    state->tickets = 0;
    state->arrived = epoch * EPOCH;
}
