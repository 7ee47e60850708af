/* Exact sums of a process: of the products of two rows, and of the elements of a few ranks.
 *
 * Integers hold a sum without error. A number is cut into pieces, each the multiple of a power of two:
 * added to 1.5 times a much larger power, it is rounded to such a multiple, and the bits of the sum
 * count them. What is left goes on to smaller pieces, and what a product lacks to those of the next.
 * Blocks of numbers that leave more than the last piece holds are added digit by digit. Compiled
 * without contraction: see setup.py. */

#include "module.h"
#include "numbers.h"
#include "exact.h"
#include "words.h"
#include <math.h>
#include <stdbool.h>

#define INLINED static inline __attribute__((always_inline))

enum { LANES = 4, STEPS = 32, BLOCK = STEPS * LANES };
enum { PIECES = 4, BITS = 51, MARGIN = 8 }; /* a later block may have larger numbers */
/* Of blocks: 51 bits, twice for each step, are added in 64. */
enum { RUN = 32, RUNS_PER_CARRY = 1 << 16 };

/* The bits of 2^-960, from which on what a product lacks is a double. */
static const long long SMALLEST = (1023ll - 960) << 52;

typedef double Lanes __attribute__((vector_size(LANES * sizeof(double))));
typedef long long Masks __attribute__((vector_size(LANES * sizeof(long long))));
typedef struct {
    Lanes shift[PIECES]; /* 1.5 * 2^(unit + 52) */
    Masks count[PIECES]; /* of multiples of 2^unit */
    int unit[PIECES];
} Pieces;

/* --- digits */

typedef unsigned __int128 Long;

static void add_bits(long long *words, Long integer, int exponent, bool is_negative)
{
    const int begin = exponent - LOWEST, shift = begin & 31;
    const Long shifted = integer << shift, above = shift ? integer >> (128 - shift) : 0;
    const long long sign = is_negative ? -1 : 0; /* digit ^ sign - sign is -digit for -1 */
    long long *digits = words + (begin >> 5);
    for (int k = 0; k < 4; k++)
        digits[k] += ((long long)(unsigned)(shifted >> 32 * k) ^ sign) - sign;
    digits[4] += ((long long)above ^ sign) - sign;
}

static void add_number(long long *words, double number)
{
    int exponent;
    const Bits mantissa = mantissa_of(number, &exponent);
    words[POSITIVE] += !is_finite(number) && !(number < 0);
    words[NEGATIVE] += !is_finite(number) && !(number > 0);
    if (is_finite(number))
        add_bits(words, mantissa, exponent, number < 0);
}

static void add_product(long long *words, double x, double y)
{
    if (!is_finite(x) || !is_finite(y)) {
        add_number(words, x * y);
        return;
    }
    int of_x, of_y;
    const Long integer = (Long)mantissa_of(x, &of_x) * mantissa_of(y, &of_y);
    add_bits(words, integer, of_x + of_y, (x < 0) != (y < 0));
}

static void carry(long long *words)
{
    long long over = 0;
    for (int at = 0; at < DIGITS - 1; at++) {
        over += words[at];
        words[at] = (unsigned)over;
        over >>= 32;
    }
    words[DIGITS - 1] += over;
}

/* --- pieces */

/* Begins a sum of numbers as large as those of a block. */
static void begin_pieces(Pieces *sum, const double *x, const double *y)
{
    Bits largest = 0;
    int unit;
    for (int at = 0; at < BLOCK; at++) {
        const Bits size = bits_of(y ? x[at] * y[at] : x[at]) & INT64_MAX;
        largest = size > largest ? size : largest;
    }
    mantissa_of(double_of(largest), &unit);
    unit += 53 + MARGIN - BITS;
    for (int at = 0; at < PIECES; at++, unit -= BITS) {
        const int within = unit < -1074 ? -1074 : unit > 971 ? 971 : unit;
        const double shift = double_of((Bits)(within + 52 + 1023) << 52 | 1ull << 51);
        sum->unit[at] = within;
        for (int lane = 0; lane < LANES; lane++) {
            sum->shift[at][lane] = shift;
            sum->count[at][lane] = 0;
        }
    }
}

static void end_pieces(long long *words, const Pieces *sum)
{
    for (int at = 0; at < PIECES; at++) {
        __int128 count = 0;
        for (int lane = 0; lane < LANES; lane++)
            count += sum->count[at][lane];
        add_bits(words, count < 0 ? -(Long)count : (Long)count, sum->unit[at], count < 0);
    }
}

/* Cuts numbers into so many pieces, and adds what is left to the bits of `left`. */
INLINED void add_pieces(Pieces *sum, const Lanes *numbers, int first, int npieces, Masks *left)
{
    Lanes rest = *numbers;
    for (int at = first; at < first + npieces; at++) {
        const Lanes shifted = rest + sum->shift[at];
        sum->count[at] += (Masks)shifted - (Masks)sum->shift[at];
        rest -= shifted - sum->shift[at];
    }
    *left |= (Masks)rest;
}

/* Adds a block of products, of x alone without y; returns false, with nothing done, where pieces
 * cannot hold them: something is left, is out of range, or what a product lacks may be no double. */
INLINED bool add_block(Pieces *sum, const double *x, const double *y, int npieces)
{
    Pieces now = *sum;
    Masks left = {0}, outside = {0}, is_small = {0}; /* in the sign bits */
    for (int step = 0; step < STEPS; step++) {
        Lanes a, b, product, lacking;
        memcpy(&a, x + step * LANES, sizeof a);
        product = a;
        if (y != NULL) {
            memcpy(&b, y + step * LANES, sizeof b);
            product = a * b;
            for (int lane = 0; lane < LANES; lane++)
                lacking[lane] = __builtin_fma(a[lane], b[lane], -product[lane]);
            const Masks size = (Masks)product & INT64_MAX;
            is_small |= (size - SMALLEST) & ~((a == 0) | (b == 0));
            add_pieces(&now, &lacking, 1, npieces, &left);
        }
        outside |= (Masks)(product + now.shift[0]) ^ (Masks)now.shift[0];
        add_pieces(&now, &product, 0, npieces, &left);
    }
    left = (left & INT64_MAX) | (outside >> 52) | (is_small & INT64_MIN);
    if (left[0] | left[1] | left[2] | left[3])
        return false;
    *sum = now;
    return true;
}

INLINED size_t add_while_held(Pieces *sum, const double *x, const double *y, size_t nblocks,
                              int npieces)
{
    Pieces now = *sum;
    size_t block = 0;
    while (block < nblocks &&
           add_block(&now, x + block * BLOCK, y ? y + block * BLOCK : NULL, npieces))
        block++;
    *sum = now;
    return block;
}

/* Adds blocks up to the first that pieces cannot hold; returns how many. */
typedef size_t AddBlocks(Pieces *sum, const double *x, const double *y, size_t nblocks,
                         bool is_wide);

INLINED size_t add_blocks(Pieces *sum, const double *x, const double *y, size_t nblocks,
                          bool is_wide)
{
    if (y == NULL && is_wide)
        return add_while_held(sum, x, NULL, nblocks, 3);
    if (y == NULL)
        return add_while_held(sum, x, NULL, nblocks, 2);
    if (is_wide)
        return add_while_held(sum, x, y, nblocks, 3);
    return add_while_held(sum, x, y, nblocks, 2);
}

/* Where the processor has no fma, the C library's is right, and slow. */
static size_t add_blocks_portably(Pieces *sum, const double *x, const double *y, size_t nblocks,
                                  bool is_wide)
{
    return add_blocks(sum, x, y, nblocks, is_wide);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static size_t
add_blocks_by_fma(Pieces *sum, const double *x, const double *y, size_t nblocks, bool is_wide)
{
    return add_blocks(sum, x, y, nblocks, is_wide);
}
#endif

static AddBlocks *choose(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return add_blocks_by_fma;
#endif
    return add_blocks_portably;
}

static void add_digits(long long *words, const double *x, const double *y, size_t begin, size_t end)
{
    for (size_t at = begin; at < end; at++)
        if (y == NULL)
            add_number(words, x[at]);
        else
            add_product(words, x[at], y[at]);
}

static bool is_negative_zero(double x, double y)
{
    return bits_of(x * y) == 1ull << 63 && (x == 0 || y == 0);
}

/* Adds the products of two rows, or the elements of x without y. */
static void add_rows(long long *words, const double *x, const double *y, size_t count)
{
    AddBlocks *const add = choose();
    if (y != NULL && count > 0 && y[0] == 1 && !memcmp(y, y + 1, (count - 1) * sizeof *y))
        y = NULL; /* a sum, which takes half the time */
    Pieces sum;
    const size_t nblocks = count / BLOCK;
    size_t at = 0, runs = 0, zeros = 0;
    while (at < nblocks) {
        const size_t end = at + RUN < nblocks ? at + RUN : nblocks;
        for (int is_wide = 0; is_wide < 2 && at < end; is_wide++) {
            const double *first = x + at * BLOCK, *second = y ? y + at * BLOCK : NULL;
            begin_pieces(&sum, first, second);
            at += add(&sum, first, second, end - at, is_wide);
            end_pieces(words, &sum);
        }
        add_digits(words, x, y, at * BLOCK, end * BLOCK);
        at = end;
        if (++runs % RUNS_PER_CARRY == 0)
            carry(words);
    }
    add_digits(words, x, y, at * BLOCK, count);
    carry(words);
    while (zeros < count && is_negative_zero(x[zeros], y ? y[zeros] : 1))
        zeros++; /* they count where all terms are such */
    words[NEGATIVE_ZEROS] += (long long)zeros;
    words[TERMS] += (long long)count;
}

/* --- the elements of a few ranks */

static float float_of_bits(Bits bits)
{
    const uint32_t narrow = (uint32_t)bits;
    float number;
    memcpy(&number, &narrow, sizeof number);
    return number;
}

static bfloat16_t bfloat16_of_bits(Bits bits) { return narrowed(float_of_bits(bits)); }

enum { FOLDED = 256 };

/* By two doubles, or by digits where these leave something. */
#define FOLD(number, type, value, of_bits, is_float)                                               \
    static Bits digits_##number(void *const *from, Py_ssize_t nranks, Py_ssize_t at)               \
    {                                                                                              \
        long long words[WORDS] = {0};                                                              \
        words[TERMS] = nranks;                                                                     \
        for (Py_ssize_t rank = 0; rank < nranks; rank++) {                                         \
            const double each = value(((const type *)from[rank])[at]);                             \
            add_number(words, each);                                                               \
            words[NEGATIVE_ZEROS] += is_negative_zero(each, 1);                                    \
        }                                                                                          \
        return rounded_words(words, 0, DIGITS - 1, is_float);                                      \
    }                                                                                              \
    void fold_exact_##number(void *into, void *const *from, Py_ssize_t nranks, Py_ssize_t count)   \
    {                                                                                              \
        for (Py_ssize_t begin = 0; begin < count; begin += FOLDED) {                               \
            const Py_ssize_t size = count - begin < FOLDED ? count - begin : FOLDED;               \
            double high[FOLDED], low[FOLDED] = {0}, is_left[FOLDED] = {0};                         \
            for (Py_ssize_t k = 0; k < size; k++)                                                  \
                high[k] = -0.0; /* which leaves the sign of a zero */                              \
            for (Py_ssize_t rank = 0; rank < nranks; rank++)                                       \
                for (Py_ssize_t k = 0; k < size; k++) {                                            \
                    const double each = value(((const type *)from[rank])[begin + k]);              \
                    const double left = two_sum(&low[k], two_sum(&high[k], each));                 \
                    is_left[k] = left == 0 ? is_left[k] : 1;                                       \
                }                                                                                  \
            for (Py_ssize_t k = 0; k < size; k++) {                                                \
                const bool is_known = is_left[k] == 0 && is_decided(high[k], low[k]);              \
                const Bits bits = is_known ? rounded_pair(high[k], low[k], is_float)               \
                                           : digits_##number(from, nranks, begin + k);             \
                ((type *)into)[begin + k] = of_bits(bits);                                         \
            }                                                                                      \
        }                                                                                          \
    }

FOLD(float64, double, (double), double_of, 0)
FOLD(float32, float, (double), float_of_bits, 1)
FOLD(bfloat16, bfloat16_t, (double)widened, bfloat16_of_bits, 1)

/* --- what Python calls, with contiguous arrays */

static void *elements_of(PyObject *array, bool is_written, Py_ssize_t *count)
{
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE))
        return NULL;
    *count = view.len / (Py_ssize_t)sizeof(double);
    PyBuffer_Release(&view); /* the caller sees to it that the memory stays */
    return view.buf;
}

PyObject *add_exactly(PyObject *module, PyObject *given)
{
    (void)module;
    PyObject *into, *first, *second;
    Py_ssize_t nwords = 0, nx = 0, ny = 0;
    if (!PyArg_ParseTuple(given, "OOO", &into, &first, &second))
        return NULL;
    long long *words = elements_of(into, true, &nwords);
    const double *x = words == NULL ? NULL : elements_of(first, false, &nx), *y = NULL;
    if (x != NULL && second != Py_None)
        y = elements_of(second, false, &ny);
    if (PyErr_Occurred())
        return NULL;
    if (nwords != WORDS || (y != NULL && nx != ny))
        return PyErr_Format(PyExc_ValueError, "%zd words; %zd and %zd doubles", nwords, nx,
                            y == NULL ? nx : ny);
    add_rows(words, x, y, (size_t)nx);
    Py_RETURN_NONE;
}

PyObject *round_exactly(PyObject *module, PyObject *given)
{
    (void)module;
    PyObject *array;
    Py_ssize_t nwords;
    int is_float;
    if (!PyArg_ParseTuple(given, "Op", &array, &is_float))
        return NULL;
    const long long *words = elements_of(array, false, &nwords);
    if (words == NULL)
        return NULL;
    if (nwords != WORDS)
        return PyErr_Format(PyExc_ValueError, "%zd words", nwords);
    const Bits bits = rounded_words(words, 0, DIGITS - 1, is_float);
    return PyFloat_FromDouble(is_float ? (double)float_of_bits(bits) : double_of(bits));
}
