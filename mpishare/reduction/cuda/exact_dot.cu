// The dot product over all ranks, rounded once. A thread holds its sum in doubles without error; what
// they leave goes into digits (words.h), of which each warp has its own in shared memory. Blocks add
// their digits in global memory, the last block those of all ranks, by LL, and rounds them.
//
// The buffer between ranks is as in small.cu, with the words of a row or two.
#include "words.h"
#include "ll_fold.cuh"

const int MAX_THREADS = 512, WARPS = MAX_THREADS / 32, IN_FLIGHT = sizeof(Number) > 8 ? 2 : 4;

// What is added of numbers: their real and imaginary parts, each with words of its own.
template <class T>
struct Parts {
    typedef T Real;
    static const int ROWS = 1;
};
template <class T>
struct Parts<Complex<T>> {
    typedef T Real;
    static const int ROWS = 2;
};
typedef Parts<Number>::Real Real;
const int ROWS = Parts<Number>::ROWS, ALL_WORDS = ROWS * WORDS;
const bool IS_FLOAT = sizeof(Real) < 8;

// Digits of a warp, in two halves each: 64-bit atomics in shared memory are loops. Read as a whole.
struct __align__(8) Row {
    unsigned halves[2 * DIGITS];
    unsigned positive, negative, negative_zeros;
};

__device__ __forceinline__ void add_bits(Row* row, Bits integer, int exponent, bool is_negative) {
    const int begin = exponent - LOWEST;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        const unsigned digit = digit_of(integer, (begin & 31) - 32 * k);
        if (!digit) continue;
        unsigned* halves = row->halves + 2 * ((begin >> 5) + k);
        const unsigned low = is_negative ? -digit : digit, before = atomicAdd(halves, low);
        const unsigned high = (is_negative ? ~0u : 0) + (before + low < low);
        if (high) atomicAdd(halves + 1, high);
    }
}

__device__ __noinline__ void add_number(Row* row, double number) {
    int exponent;
    const Bits mantissa = mantissa_of(number, &exponent);
    add_bits(row, mantissa, exponent, number < 0);
}

__device__ __noinline__ void add_integers(Row* row, double x, double y) {
    const double product = x * y;
    if (!is_finite(x) || !is_finite(y)) {
        if (!(product < 0)) atomicAdd(&row->positive, 1);
        if (!(product > 0)) atomicAdd(&row->negative, 1);
        return;
    }
    int of_x, of_y;
    const Bits a = mantissa_of(x, &of_x), b = mantissa_of(y, &of_y);
    const bool is_negative = (x < 0) != (y < 0);
    add_bits(row, a * b, of_x + of_y, is_negative);
    add_bits(row, __umul64hi(a, b), of_x + of_y + 64, is_negative);
}

// A thread's sum: of products as rounded, of what these lack, of what both leave.
struct Expansion {
    double high[2] = {}, low[2] = {}, wide[2] = {};
    unsigned negative_zeros = 0;

    __device__ __forceinline__ static double add(double (&sum)[2], double number) {
        return two_sum(&sum[1], two_sum(&sum[0], number));
    }
    __device__ __forceinline__ void keep(Row* row, double left) {
        left = add(wide, left);
        if (left != 0) add_number(row, left);
    }
    __device__ __forceinline__ void add_product(Row* row, double x, double y) {
        double product = x * y, lacking = 0;
        // What a product of two floats lacks is 0, unless it is infinite.
        const unsigned least = IS_FLOAT ? 0 : (1023 - 960) << 20, most = (1023 + 980) << 20;
        const unsigned size = __double2hiint(product) & 0x7fffffff;
        if (size - least < most - least && (!IS_FLOAT || product != 0)) {
            if (!IS_FLOAT) lacking = add(low, fma(x, y, -product));
            product = add(high, product);
            if (product != 0) keep(row, product);
            if (!IS_FLOAT && lacking != 0) keep(row, lacking);
        } else if (product == 0 && (x == 0 || y == 0)) {
            negative_zeros += __double2hiint(product) < 0;
        } else {
            add_integers(row, x, y);
        }
    }
    // Adds the sums of all lanes to the digits of the warp: of as few lanes as nothing is lost by.
    __device__ __forceinline__ void end(Row* row) {
        const int lane = threadIdx.x % 32;
        int lanes = 32;
#pragma unroll
        for (; lanes > 1; lanes /= 2) {
            double sums[2][2] = {{high[0], high[1]}, {low[0], low[1]}};
            bool is_left = fold_lanes(sums[0], lanes / 2);
            if (!IS_FLOAT) is_left |= fold_lanes(sums[1], lanes / 2);
            if (__any_sync(~0u, is_left && lane < lanes / 2)) break;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                high[k] = sums[0][k];
                low[k] = sums[1][k];
            }
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if (wide[k] != 0) add_number(row, wide[k]);
            if (lane >= lanes) continue;
            if (high[k] != 0) add_number(row, high[k]);
            if (!IS_FLOAT && low[k] != 0) add_number(row, low[k]);
        }
        if (negative_zeros) atomicAdd(&row->negative_zeros, negative_zeros);
    }
    // Adds the sum of another lane; returns whether the sum lacks something.
    __device__ __forceinline__ static bool fold_lanes(double (&sum)[2], int lanes) {
        double theirs[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) theirs[k] = __shfl_down_sync(~0u, sum[k], lanes);
        const double first = add(sum, theirs[0]), second = two_sum(&sum[1], theirs[1]);
        return first != 0 || second != 0;
    }
};

template <class T>
__device__ __forceinline__ double wide_of(T number) { return number; }
template <class Format>
__device__ __forceinline__ double wide_of(Narrow<Format> number) { return number.value(); }

template <class T>
__device__ __forceinline__ void add_product(Expansion* sums, Row* rows, T x, T y) {
    sums[0].add_product(rows, wide_of(x), wide_of(y));
}
template <class T>
__device__ __forceinline__ void add_product(
    Expansion* sums, Row* rows, Complex<T> x, Complex<T> y
) {
    sums[0].add_product(rows, x.re, y.re);
    sums[0].add_product(rows, x.im, y.im);
    sums[1].add_product(rows + 1, x.re, y.im);
    sums[1].add_product(rows + 1, x.im, -y.re);
}

template <class T>
__device__ __forceinline__ T narrowed(const Bits* bits, T*) {
    if constexpr (IS_FLOAT) return __uint_as_float(static_cast<unsigned>(bits[0]));
    else return double_of(bits[0]);
}
template <class Format>
__device__ __forceinline__ Narrow<Format> narrowed(const Bits* bits, Narrow<Format>*) {
    return Narrow<Format>::of(__uint_as_float(static_cast<unsigned>(bits[0])));
}
template <class T>
__device__ __forceinline__ Complex<T> narrowed(const Bits* bits, Complex<T>*) {
    return {narrowed(bits, static_cast<T*>(nullptr)), narrowed(bits + 1, static_cast<T*>(nullptr))};
}

__device__ __forceinline__ void add_elements(
    Expansion* sums, Row* rows, char* x, char* y, const Shape& of_x, const Shape& of_y, Word count
) {
    const Word step = static_cast<Word>(gridDim.x) * blockDim.x;
    Word i = static_cast<Word>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i < count; i += IN_FLIGHT * step) {
        Number *at[2][IN_FLIGHT], a[IN_FLIGHT], b[IN_FLIGHT];
        elements({x, y}, {&of_x, &of_y}, i, step, at);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k)
            if (i + k * step < count) {
                a[k] = *at[0][k];
                b[k] = *at[1][k];
            }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k)
            if (i + k * step < count) add_product(sums, rows, a[k], b[k]);
    }
}

// Adds the digits of all warps, as 64 bits, and carries once: sums of many blocks have room.
__device__ __forceinline__ void add_warps(
    const Row (*rows)[ROWS], long long* words, Word terms, int row
) {
    const int warps = blockDim.x / 32;
    for (int at = threadIdx.x; at < WORDS; at += blockDim.x) {
        long long sum = 0, below = 0;
        for (int warp = 0; warp < warps; ++warp) {
            const Row& mine = rows[warp][row];
            if (at < DIGITS) sum += *reinterpret_cast<const long long*>(mine.halves + 2 * at);
            else if (at == POSITIVE) sum += mine.positive;
            else if (at == NEGATIVE) sum += mine.negative;
            else if (at == NEGATIVE_ZEROS) sum += mine.negative_zeros;
            if (at && at < DIGITS) below += *reinterpret_cast<const long long*>(mine.halves + 2 * at - 2);
        }
        if (at < DIGITS - 1) sum = static_cast<unsigned>(sum);
        words[at] = at == TERMS ? terms : sum + (below >> 32);
    }
}

// Rounds words in shared memory and stores the number, by the whole block.
__device__ __forceinline__ void store_rounded(const long long* words, Number* out) {
    __shared__ int first[ROWS], last[ROWS];
    __shared__ Bits bits[ROWS];
    if (threadIdx.x < ROWS) {
        first[threadIdx.x] = DIGITS;
        last[threadIdx.x] = 0;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < ALL_WORDS; at += blockDim.x)
        if (at % WORDS < DIGITS && words[at]) {
            atomicMin(&first[at / WORDS], at % WORDS);
            atomicMax(&last[at / WORDS], at % WORDS);
        }
    __syncthreads();
    const int row = threadIdx.x;
    if (row < ROWS) bits[row] = rounded_words(words + row * WORDS, first[row], last[row], IS_FLOAT);
    __syncthreads();
    if (threadIdx.x == 0) *out = narrowed(bits, static_cast<Number*>(nullptr));
}

// `out` is a number, or, if `me` is -1, the words of this rank.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, ROWS == 1 ? 2 : 1) exact_dot(
    const __grid_constant__ Peers peers, const __grid_constant__ Shape of_x,
    const __grid_constant__ Shape of_y, char* x, char* y, char* out, Word count, long long* totals,
    int me, State* state, const __grid_constant__ Host host
) {
    __shared__ Row of_warps[WARPS][ROWS];
    __shared__ long long words[ALL_WORDS];
    __shared__ bool is_last;
    const Word epoch = epoch_of(state); // early; the last block alone raises it
    Row* rows = of_warps[threadIdx.x / 32];
    for (int at = threadIdx.x % 32; at < ROWS * sizeof(Row) / 4; at += 32)
        reinterpret_cast<unsigned*>(rows)[at] = 0;
    __syncwarp();
    Expansion sums[ROWS];
    add_elements(sums, rows, x, y, of_x, of_y, count);
    __syncwarp();
#pragma unroll
    for (int row = 0; row < ROWS; ++row) sums[row].end(rows + row);
    __syncthreads();
    const Word terms = blockIdx.x ? 0 : ROWS * count;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) add_warps(of_warps, words + row * WORDS, terms, row);
    __syncthreads();
    if (gridDim.x > 1) {
        for (int at = threadIdx.x; at < ALL_WORDS; at += blockDim.x)
            if (words[at]) atomicAdd(reinterpret_cast<Word*>(totals) + at, words[at]);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) is_last = atomicAdd(&state->tickets, 1) == gridDim.x - 1;
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        for (int at = threadIdx.x; at < ALL_WORDS; at += blockDim.x) {
            words[at] = __ldcg(totals + at);
            totals[at] = 0;
        }
    }
    bool is_whole = true;
    if (RANKS > 1 && me >= 0) {
        const Word flag = epoch << 32, stride = 2 * ALL_WORDS, here = (epoch & 1) * RANKS * stride;
        const Word* from = reinterpret_cast<const Word*>(peers.at[me]) + here;
        for (int at = threadIdx.x; at < ALL_WORDS; at += blockDim.x)
            send_to_ranks(LL<long long>::of(words[at]), peers, me, here + me * stride + 2 * at, flag);
        Wait wait(host, &state->aborted, epoch);
        for (int at = threadIdx.x; is_whole && at < ALL_WORDS; at += blockDim.x) {
            const LL<long long> mine = LL<long long>::of(words[at]);
            is_whole = fold_ranks<InOrder<long long>>(
                mine, from + 2 * at, stride, me, flag, wait, words[at]
            );
        }
        wait.end(RANKS);
    }
    is_whole = __syncthreads_and(is_whole);
    if (me < 0)
        for (int at = threadIdx.x; at < ALL_WORDS; at += blockDim.x)
            reinterpret_cast<long long*>(out)[at] = words[at];
    else if (is_whole) store_rounded(words, reinterpret_cast<Number*>(out));
    if (threadIdx.x) return;
    state->tickets = 0;
    state->arrived = epoch * EPOCH;
}

// Rounds the words that other launches have combined.
extern "C" __global__ void exact_round(const long long* of_ranks, Number* out) {
    __shared__ long long words[ALL_WORDS];
    for (int at = threadIdx.x; at < ALL_WORDS; at += blockDim.x) words[at] = of_ranks[at];
    __syncthreads();
    store_rounded(words, out);
}
