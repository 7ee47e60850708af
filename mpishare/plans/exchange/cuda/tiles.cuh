// Items that are transposed through shared memory: tiles.py cuts them. TILED is the size of an
// element, one for all of a plan: code for each size would take too many registers.
#if TILED == 16
typedef uint4 Element;
#elif TILED == 8
typedef unsigned long long Element;
#elif TILED == 4
typedef unsigned Element;
#elif TILED == 2
typedef unsigned short Element;
#else
typedef unsigned char Element;
#endif

// Bytes from element to element of a row where it is stored.
#if REVERSED
typedef long long RowUnit;
#else
typedef unsigned RowUnit;
#endif

const int LINE_DEPTH = TILED == 16 ? 4 : 8; // elements that a thread has in flight
const int ROW_PADDING = TILED < 4 ? 4 : TILED;
// Of a tile with its padding: _TILE_NBYTES and _MAX_CELLS in tiles.py.
const int TILE_NBYTES = (32 << 10) + 256 * ROW_PADDING;

// Copies `count` elements, with steps in bytes.
__device__ __forceinline__ void copy_line(
    const char* from, long long from_step, char* to, long long to_step, unsigned count
) {
#pragma unroll 1
    for (unsigned i = 0; i < count; i += LINE_DEPTH) {
        Element unit[LINE_DEPTH];
#pragma unroll
        for (int k = 0; k < LINE_DEPTH; ++k)
            if (i + k < count) unit[k] = *reinterpret_cast<const Element*>(from + k * from_step);
#pragma unroll
        for (int k = 0; k < LINE_DEPTH; ++k)
            if (i + k < count) *reinterpret_cast<Element*>(to + k * to_step) = unit[k];
        from += LINE_DEPTH * from_step;
        to += LINE_DEPTH * to_step;
    }
}

// The place of this thread, where threads next to each other are at the 1 << log_width places of a
// line, and more lines lie `stride` apart.
struct Lines {
    unsigned place, first, stride;

    __device__ __forceinline__ Lines(int log_width)
        : place(threadIdx.x & ((1u << log_width) - 1)), first(threadIdx.x >> log_width),
          stride(blockDim.x >> log_width) {}
    __device__ __forceinline__ unsigned count(unsigned width, unsigned nlines) const {
        return place < width && first < nlines ? (nlines - first - 1) / stride + 1 : 0;
    }
};

// Copies a tile, whose rows lie together in `from` and whose columns in `to`, `row_unit` apart: one
// element, perhaps backwards. In shared memory rows
// are padded by a word or a unit, so that a column lies in different banks.
__device__ __forceinline__ void copy_tile(
    const Item& item, const char* from, long long row_step, char* to, long long column_step,
    RowUnit row_unit, unsigned nrows, unsigned ncolumns, char* tile
) {
    const unsigned pitch = (TILED << item.log_columns) + ROW_PADDING;
    const Lines rows(item.log_columns), columns(item.log_rows);
    copy_line(from + rows.first * row_step + rows.place * TILED, rows.stride * row_step,
              tile + rows.first * pitch + rows.place * TILED, rows.stride * pitch,
              rows.count(ncolumns, nrows));
    __syncthreads();
    copy_line(tile + columns.place * pitch + columns.first * TILED, columns.stride * TILED,
              to + columns.first * column_step + columns.place * row_unit,
              columns.stride * column_step, columns.count(nrows, ncolumns));
    __syncthreads();
}

// Copies the last two axes of an item, rows and columns, once for each place along the others: from
// a field where the item is LOCAL, else from its packed cells.
__device__ __noinline__ void copy_tiles(const Item& item, char* source, char* field) {
    __shared__ uint4 tile[TILE_NBYTES / sizeof(uint4)];
    const bool is_local = item.kind == LOCAL;
    const Part& target = is_local ? *item.target : item.part;
    const int axis = target.axes - 2;
    const unsigned nrows = target.extent[axis], ncolumns = target.extent[axis + 1];
    const long long column_step = target.step[axis + 1];
    const RowUnit row_unit = REVERSED ? static_cast<RowUnit>(target.step[axis]) : TILED;
    const long long row_step = is_local ? item.part.step[axis] : ncolumns * TILED;
#pragma unroll 1
    for (unsigned first = 0; first < item.nunits; first += nrows * ncolumns) {
        const char* from = source + (is_local ? offset_of(item.part, first) : first * TILED);
        char* to = field + offset_of(target, first);
#pragma unroll 1
        for (unsigned row = 0; row < nrows; row += 1u << item.log_rows)
#pragma unroll 1
            for (unsigned column = 0; column < ncolumns; column += 1u << item.log_columns)
                copy_tile(item, from + row * row_step + column * TILED, row_step,
                          to + column * column_step + row * row_unit, column_step, row_unit,
                          min(1u << item.log_rows, nrows - row),
                          min(1u << item.log_columns, ncolumns - column),
                          reinterpret_cast<char*>(tile));
    }
}
