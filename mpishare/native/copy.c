/* The loops of copy.h, in which copies of long runs go past the caches. */
#include "copy.h"
#include "numbers.h"

#include <stdbool.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

/* Large copies in long runs go past the caches, which hold no such face anyway: with 8 and 31
 * processes 4 MiB in one run took 0.7 and 0.5 of the time so, 1 MiB up to 1.3 of it. With 2
 * processes 4 to 16 MiB took 0.65 to 0.8 in runs of 64 KiB to 1 MiB, up to 1.2 in those of 4 KiB. */
static const size_t STREAMED_NBYTES = 2 << 20, STREAMED_RUN_NBYTES = 64 << 10;

enum { PREFETCHED_NBYTES = 2048 };

/* Runs of more bytes glibc before 2.39 copies by `rep movsb`, which takes Zen 3 and 4 twenty to
 * forty times as long if the target begins 1 to 31 bytes behind the source, modulo a page (bug
 * 30994 of glibc). From a window into an array of NumPy's it does: large ones begin 16 bytes behind
 * the start of a page. */
static const size_t REPEATED_NBYTES = 2 << 10;

static bool is_just_behind(const char *to, const char *from)
{
    return ((uintptr_t)to - (uintptr_t)from - 1) % 4096 < 31;
}

static void copy_by_lines(char *to, const char *from, size_t nbytes)
{
    size_t at = 0;
    for (; at + 64 <= nbytes; at += 64) {
        __m128i line[4]; /* all of it is loaded before it is stored: the addresses look alike */
        for (int part = 0; part < 4; part++)
            line[part] = _mm_loadu_si128((const __m128i *)(from + at) + part);
        for (int part = 0; part < 4; part++)
            _mm_storeu_si128((__m128i *)(to + at) + part, line[part]);
    }
    memcpy(to + at, from + at, nbytes - at);
}

static void stream(char *to, const char *from, size_t nbytes)
{
    const size_t head = -(uintptr_t)to % 64;
    memcpy(to, from, head);
    size_t at = head;
    for (; at + 64 <= nbytes; at += 64) {
        __builtin_prefetch(from + at + PREFETCHED_NBYTES);
        for (int part = 0; part < 64; part += 16)
            _mm_stream_si128((__m128i *)(to + at + part),
                             _mm_loadu_si128((const __m128i *)(from + at + part)));
    }
    memcpy(to + at, from + at, nbytes - at);
    _mm_sfence(); /* else a release store would not come after these */
}

/* `total` are the bytes of all runs of a copy. */
static void copy_run(char *to, const char *from, size_t nbytes, size_t total)
{
    if (total >= STREAMED_NBYTES && nbytes >= STREAMED_RUN_NBYTES)
        stream(to, from, nbytes);
    else if (nbytes > REPEATED_NBYTES && is_just_behind(to, from))
        copy_by_lines(to, from, nbytes);
    else
        memcpy(to, from, nbytes);
}
#else
static void copy_run(char *to, const char *from, size_t nbytes, size_t total)
{
    (void)total;
    memcpy(to, from, nbytes);
}
#endif

static inline int64_t offset(const int64_t *table, int64_t step, int64_t at)
{
    return table ? table[at] : at * step;
}

static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

static inline size_t nbytes_of(const Axis *axis, size_t run, int64_t at)
{
    return axis->nbytes_at ? (size_t)axis->nbytes_at[at] : run;
}

/* The innermost loop, for runs of a constant size: these are single moves. */
#define LOOP(SIZE)                                                                                 \
    for (int64_t at = 0; at < count; at++, to += to_step, from += from_step)                       \
        memcpy(to, from, SIZE)
#define PLACES(SIZE)                                                                               \
    for (int64_t at = 0; at < count; at++)                                                         \
        memcpy(to + offset(to_at, to_step, at), from + offset(from_at, from_step, at), SIZE)

static void copy_places(const Axis *axis, size_t run, char *to, const char *from)
{
    const int64_t count = axis->count, to_step = axis->to, from_step = axis->from;
    const int64_t *to_at = axis->to_at, *from_at = axis->from_at;
    switch (axis->nbytes_at ? 0 : run) {
    case 4: PLACES(4); return;
    case 8: PLACES(8); return;
    case 16: PLACES(16); return;
    default:
        for (int64_t at = 0; at < count; at++) {
            const size_t nbytes = nbytes_of(axis, run, at);
            copy_run(to + offset(to_at, to_step, at), from + offset(from_at, from_step, at),
                     nbytes, (size_t)count * nbytes);
        }
        return;
    }
}

void copy_line(const Copy *copy, const Axis *axis, char *to, const char *from)
{
    const size_t run = copy->run;
    const int64_t count = axis->count, to_step = axis->to, from_step = axis->from;
    const size_t total = (size_t)count * run;
    if (axis->to_at || axis->from_at) {
        copy_places(axis, run, to, from);
        return;
    }
    switch (run) {
    case 1: LOOP(1); return;
    case 2: LOOP(2); return;
    case 4: LOOP(4); return;
    case 8: LOOP(8); return;
    case 16: LOOP(16); return;
    case 24: LOOP(24); return;
    case 32: LOOP(32); return;
    case 64: LOOP(64); return;
    default:
        for (int64_t at = 0; at < count; at++, to += to_step, from += from_step)
            copy_run(to, from, run, total);
        return;
    }
}

static void single_run(char *to, const char *from, size_t nbytes)
{
    for (size_t at = 0; at < nbytes; at += sizeof(double)) {
        double number;
        memcpy(&number, from + at, sizeof number);
        number = (float)number;
        memcpy(to + at, &number, sizeof number);
    }
}

void single_line(const Copy *copy, const Axis *axis, char *to, const char *from)
{
    for (int64_t at = 0; at < axis->count; at++)
        single_run(to + offset(axis->to_at, axis->to, at),
                   from + offset(axis->from_at, axis->from, at), nbytes_of(axis, copy->run, at));
}

#define ADD(number, type, wide)                                                                     \
    static inline void add_run_##number(char *to, const char *from, size_t run)                      \
    {                                                                                              \
        for (size_t at = 0; at < run; at += sizeof(type)) {                                        \
            type sum, other; /* copied, since fields may lie at odd addresses */                   \
            memcpy(&sum, to + at, sizeof sum);                                                     \
            memcpy(&other, from + at, sizeof other);                                               \
            sum = sum_##number(sum, other);                                                             \
            memcpy(to + at, &sum, sizeof sum);                                                     \
        }                                                                                          \
    }                                                                                              \
    static void add_line_##number(const Copy *copy, const Axis *axis, char *to, const char *from)    \
    {                                                                                              \
        const size_t run = copy->run;                                                              \
        const int64_t count = axis->count, to_step = axis->to, from_step = axis->from;             \
        if (axis->to_at || axis->from_at)                                                          \
            for (int64_t at = 0; at < count; at++)                                                 \
                add_run_##number(to + offset(axis->to_at, to_step, at),                            \
                                 from + offset(axis->from_at, from_step, at),                      \
                                 nbytes_of(axis, run, at));                                        \
        else if (run == sizeof(type))                                                              \
            for (int64_t at = 0; at < count; at++, to += to_step, from += from_step)               \
                add_run_##number(to, from, sizeof(type));                                            \
        else                                                                                       \
            for (int64_t at = 0; at < count; at++, to += to_step, from += from_step)               \
                add_run_##number(to, from, run);                                                     \
    }

EACH_NUMBER(ADD)

/* Each product and each sum is rounded: the compiler may not contract them (setup.py). */
#define SCALE(number, type, wide)                                                                  \
    static inline void scale_##number(type *value, const type *scale)                              \
    {                                                                                              \
        *value = prod_##number(*value, *scale);                                                    \
    }                                                                                              \
    SCALE_LINE(number, number, type, 1)

/* A real factor is one of both parts, so that infinite ones stay what they are. */
#define SCALE_PAIR(pair, number, type)                                                             \
    static inline void scale_##pair(type *value, const type *scale)                                \
    {                                                                                              \
        const type real = value[0], imaginary = value[1];                                          \
        value[0] = real * scale[0];                                                                \
        value[1] = imaginary * scale[0];                                                           \
        if (scale[1] != 0) {                                                                       \
            value[0] -= imaginary * scale[1];                                                      \
            value[1] = real * scale[1] + value[1];                                                 \
        }                                                                                          \
    }                                                                                              \
    SCALE_LINE(pair, number, type, 2)

/* What does not change in the loops is copied first: stores of bytes might change all else. */
#define SCALE_LINE(name, number, type, COUNT)                                                      \
    static inline void scale_run_##name(char *to, const char *from, size_t nbytes, const Factors by)\
    {                                                                                              \
        type scale[COUNT], added[COUNT], value[COUNT], sum[COUNT];                                 \
        memcpy(scale, by.scale, sizeof scale);                                                     \
        memcpy(added, by.offset, sizeof added);                                                    \
        for (size_t at = 0; at < nbytes; at += sizeof value) {                                     \
            memcpy(value, from + at, sizeof value);                                                \
            if (by.scales)                                                                         \
                scale_##name(value, scale);                                                        \
            for (int part = 0; by.offsets && part < COUNT; part++)                                 \
                value[part] = sum_##number(value[part], added[part]);                              \
            if (by.adds)                                                                           \
                memcpy(sum, to + at, sizeof sum);                                                  \
            for (int part = 0; by.adds && part < COUNT; part++)                                    \
                value[part] = sum_##number(sum[part], value[part]);                                \
            memcpy(to + at, value, sizeof value);                                                  \
        }                                                                                          \
    }                                                                                              \
    static void scale_line_##name(const Copy *copy, const Axis *axis, char *to, const char *from)  \
    {                                                                                              \
        const Factors by = *copy->factors;                                                         \
        const Axis loop = *axis;                                                                   \
        const size_t run = copy->run;                                                              \
        if (loop.to_at || loop.from_at)                                                            \
            for (int64_t at = 0; at < loop.count; at++)                                            \
                scale_run_##name(to + offset(loop.to_at, loop.to, at),                             \
                                 from + offset(loop.from_at, loop.from, at),                       \
                                 nbytes_of(&loop, run, at), by);                                   \
        else if (run == COUNT * sizeof(type))                                                      \
            for (int64_t at = 0; at < loop.count; at++, to += loop.to, from += loop.from)          \
                scale_run_##name(to, from, COUNT * sizeof(type), by);                              \
        else                                                                                       \
            for (int64_t at = 0; at < loop.count; at++, to += loop.to, from += loop.from)          \
                scale_run_##name(to, from, run, by);                                               \
    }

EACH_NUMBER(SCALE)
EACH_PAIR(SCALE_PAIR)

const Adding *find_adding(const char *name)
{
#define ROW(number, type, wide)                                                                    \
    {#number, add_line_##number, scale_line_##number, sizeof(type), sizeof(type)},
#define PAIR(pair, number, type)                                                                   \
    {#pair, add_line_##number, scale_line_##pair, sizeof(type), 2 * sizeof(type)},
    static const Adding known[] = {EACH_NUMBER(ROW) EACH_PAIR(PAIR)};
    for (size_t at = 0; at < sizeof known / sizeof *known; at++)
        if (!strcmp(known[at].name, name))
            return known + at;
    return NULL;
}

static inline int64_t size_of(int64_t step) { return step < 0 ? -step : step; }

/* Whether cells lie in another order at either end: one of two axes is the faster of the two here,
 * the other there. */
static bool is_transposed(const Axis *row, const Axis *column)
{
    const bool is_plain = !(row->to_at || row->from_at || column->to_at || column->from_at);
    return is_plain && (size_of(row->to) < size_of(column->to)) !=
                           (size_of(row->from) < size_of(column->from));
}

/* Tiles of so many bytes along either axis, of so many cells at least: the lines of both ends are
 * still in the caches when the next row of the tile needs them. */
enum { TILE_NBYTES = 256, TILE_CELLS = 32, MAX_TILED_RUN = 16 };

#define TILES(SIZE)                                                                                \
    for (int64_t row = 0; row < rows->count; row += side)                                          \
        for (int64_t column = 0; column < columns->count; column += side) {                        \
            const int64_t width = least(side, columns->count - column);                            \
            for (int64_t r = row; r < least(row + side, rows->count); r++) {                       \
                char *target = to + r * rows->to + column * to_step;                               \
                const char *source = from + r * rows->from + column * from_step;                   \
                for (int64_t at = 0; at < width; at++, target += to_step, source += from_step)     \
                    memcpy(target, source, SIZE);                                                  \
            }                                                                                      \
        }

/* Stores along columns. Where these are the fastest cells of the target, 32 x 65536 cells of 16
 * bytes took 8.3 ms, where they are those of the source 8.4 to 20.7, and 36.7 without tiles. */
static void transpose(const Axis *rows, const Axis *columns, size_t run, char *to, const char *from)
{
    const int64_t of_nbytes = TILE_NBYTES / (int64_t)run, to_step = columns->to;
    const int64_t side = of_nbytes < TILE_CELLS ? TILE_CELLS : of_nbytes;
    const int64_t from_step = columns->from;
    switch (run) {
    case 4: TILES(4) return;
    case 8: TILES(8) return;
    case 16: TILES(16) return;
    default: TILES(run) return;
    }
}

static void zero_runs(const Axis *axis, size_t run, char *from)
{
    const int64_t count = axis->count, *from_at = axis->from_at, step = axis->from;
#define ZERO(SIZE)                                                                                 \
    for (int64_t at = 0; at < count; at++)                                                         \
        memset(from + offset(from_at, step, at), 0, SIZE)
    switch (axis->nbytes_at ? 0 : run) {
    case 4: ZERO(4); return;
    case 8: ZERO(8); return;
    case 16: ZERO(16); return;
    default: ZERO(nbytes_of(axis, run, at)); return;
    }
}

/* Taken from so many bytes at a time, which are then still in the cache. */
enum { TAKEN_NBYTES = 64 << 10 };

static void take_line(const Copy *copy, const Axis *axis, char *to, char *from)
{
    const bool has_places = axis->to_at || axis->from_at;
    const size_t run = copy->run, least_nbytes = run < 64 ? 64 : run; /* of a cache line */
    Copy part = *copy;
    Axis some = *axis;
    if (!has_places && run > TAKEN_NBYTES) {
        some.count = 1;
        for (int64_t at = 0; at < axis->count; at++)
            for (size_t done = 0; done < run; done += part.run) {
                char *here = from + at * axis->from + done;
                part.run = run - done < TAKEN_NBYTES ? run - done : TAKEN_NBYTES;
                if (copy->line == copy_line)
                    copy_run(to + at * axis->to + done, here, part.run, run);
                else
                    copy->line(&part, &some, to + at * axis->to + done, here);
                memset(here, 0, part.run);
            }
        return;
    }
    const int64_t each = has_places ? axis->count : (int64_t)(TAKEN_NBYTES / least_nbytes);
    for (int64_t first = 0; first < axis->count; first += each) {
        some.count = least(each, axis->count - first);
        copy->line(copy, &some, to + first * axis->to, from + first * axis->from);
        zero_runs(&some, run, from + first * axis->from);
    }
}

static void move_line(const Copy *copy, const Axis *axis, char *to, char *from)
{
    if (copy->takes)
        take_line(copy, axis, to, from);
    else
        copy->line(copy, axis, to, from);
}

static void move_axes(const Axis *axes, int naxes, const Copy *copy, char *to, char *from)
{
    if (naxes == 1) {
        move_line(copy, axes, to, from);
        return;
    }
    if (naxes == 2 && !copy->takes && copy->line == copy_line && copy->run <= MAX_TILED_RUN &&
        is_transposed(axes, axes + 1)) {
        const bool is_fastest_last = size_of(axes[1].to) < size_of(axes[0].to);
        transpose(&axes[!is_fastest_last], &axes[is_fastest_last], copy->run, to, from);
        return;
    }
    for (int64_t at = 0; at < axes->count; at++)
        move_axes(axes + 1, naxes - 1, copy,
                  to + offset(axes->to_at, axes->to, at),
                  from + offset(axes->from_at, axes->from, at));
}

void move_cells(const Copy *copy, char *to, char *from)
{
    static const Axis once = {.count = 1};
    to += copy->to;
    from += copy->from;
    if (copy->slide) {
        copy->axes[copy->sliding].count = copy->slide[0];
        to += copy->slide[1];
        from += copy->slide[2];
    }
    if (copy->naxes == 0 && copy->line == copy_line && !copy->takes) /* small faces are mostly one run */
        copy_run(to, from, copy->run, copy->run);
    else if (copy->naxes < 2)
        move_line(copy, copy->naxes ? copy->axes : &once, to, from);
    else
        move_axes(copy->axes, copy->naxes, copy, to, from);
}
