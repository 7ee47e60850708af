// The dot product over all ranks in one launch: each block sums its elements, the last one that
// comes to its end folds the blocks in their order and goes on to the other ranks, by LL.
//
// The order of all sums depends on the number of elements, of blocks and of ranks alone. The buffer
// between ranks is as in small.cu, with one element; only the last block waits for other ranks.
#include "elements.cuh"
#include "waiting.cuh"
#include "ll.cuh"

const int THREADS = 512, DEPTH = 8;

// In what a rank's own sum is kept.
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

template <>
struct Sum<Half> {
    float total = 0;
    __device__ __forceinline__ void add_product(Half x, Half y) {
        total = fmaf(x.value(), y.value(), total);
    }
    __device__ __forceinline__ void add(const Sum& other) { total += other.total; }
    __device__ __forceinline__ Half value() const { return Half::of(total); }
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

__device__ __forceinline__ Partial shifted_down(const Partial& mine, int lanes) {
    const int words = (sizeof(Partial) + 3) / 4;
    unsigned word[words] = {};
    memcpy(word, &mine, sizeof mine);
#pragma unroll
    for (int k = 0; k < words; ++k) word[k] = __shfl_down_sync(~0u, word[k], lanes);
    Partial other;
    memcpy(&other, word, sizeof other);
    return other;
}

// The sum over a block, in thread 0.
__device__ Partial sum_of_block(Partial mine) {
    __shared__ Partial of_warp[THREADS / 32];
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) mine.add(shifted_down(mine, lanes));
    __syncthreads(); // the last sum has been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x < 32) {
        mine = threadIdx.x < THREADS / 32 ? of_warp[threadIdx.x] : Partial();
#pragma unroll
        for (int lanes = THREADS / 64; lanes; lanes /= 2) mine.add(shifted_down(mine, lanes));
    }
    return mine;
}

__device__ __forceinline__ Partial sum_of_elements(
    char* x, char* y, const Shape& of_x, const Shape& of_y, Word count
) {
    Partial sums[DEPTH];
    const Word step = static_cast<Word>(gridDim.x) * THREADS;
    Word i = static_cast<Word>(blockIdx.x) * THREADS + threadIdx.x;
    for (; i + (DEPTH - 1) * step < count; i += DEPTH * step) {
        Number a[DEPTH], b[DEPTH];
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            a[k] = *element(x, of_x, i + k * step);
            b[k] = *element(y, of_y, i + k * step);
        }
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) sums[k].add_product(a[k], b[k]);
    }
#pragma unroll
    for (int k = 0; k < DEPTH; ++k)
        if (i + k * step < count)
            sums[k].add_product(*element(x, of_x, i + k * step), *element(y, of_y, i + k * step));
#pragma unroll
    for (int width = DEPTH / 2; width; width /= 2)
#pragma unroll
        for (int k = 0; k < width; ++k) sums[k].add(sums[k + width]);
    return sums[0];
}

// Sends my sum to all ranks and folds theirs, with the first warp: lane k serves ranks k, k + 32,
// ... Returns whether the sum is whole; it is in lane 0.
__device__ __forceinline__ bool sum_of_ranks(
    const Peers& peers, int me, Number& sum, State* state, const Host& host
) {
    const Word epoch = epoch_of(state), flag = epoch << 32;
    const Word here = (epoch & 1) * RANKS * WORDS;
    LL mine = split(sum);
#pragma unroll
    for (int k = 0; k < WORDS; ++k) mine.data[k] = __shfl_sync(~0u, mine.data[k], 0);
    Wait wait(host, state, epoch);
    LL words[(RANKS + 31) / 32];
    bool is_whole = true;
#pragma unroll
    for (int group = 0; group < RANKS; group += 32) {
        const int rank = group + threadIdx.x;
        if (rank < RANKS && rank != me)
            put_ll(reinterpret_cast<Word*>(peers.at[rank]) + here + me * WORDS, mine, flag);
    }
#pragma unroll
    for (int group = 0; group < RANKS; group += 32) {
        const int rank = group + threadIdx.x;
        const Word* from = reinterpret_cast<const Word*>(peers.at[me]) + here + rank * WORDS;
        LL& theirs = words[group / 32];
        theirs = mine;
        if (rank < RANKS && rank != me)
            while (is_whole && !get_ll(from, theirs, flag)) is_whole = wait.keep_waiting(rank);
    }
    wait.end();
    is_whole = __all_sync(~0u, is_whole);
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
        LL theirs;
#pragma unroll
        for (int k = 0; k < WORDS; ++k)
            theirs.data[k] = __shfl_sync(~0u, words[rank / 32].data[k], rank % 32);
        sum = rank ? combine(sum, joined(theirs)) : joined(theirs);
    }
    return is_whole;
}

extern "C" __global__ void __launch_bounds__(THREADS) dot(
    const __grid_constant__ Peers peers, const __grid_constant__ Shape of_x,
    const __grid_constant__ Shape of_y, char* x, char* y, Number* out, Word count,
    Partial* of_blocks, int me, State* state, const __grid_constant__ Host host
) {
    __shared__ bool is_last;
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
        for (unsigned block = threadIdx.x; block < gridDim.x; block += THREADS) {
            Partial other;
            memcpy(&other, of_blocks + block, sizeof other);
            of_thread.add(other);
        }
        sum = sum_of_block(of_thread);
    }
    if (threadIdx.x >= 32) return;
    Number total = sum.value();
    bool is_whole = true;
    if constexpr (RANKS > 1)
        if (me >= 0) is_whole = sum_of_ranks(peers, me, total, state, host); // else: to load it
    if (threadIdx.x == 0) {
        if (is_whole) *out = total;
        state->tickets = 0;
        state->arrived += EPOCH; // the only block that looks at it
    }
}
