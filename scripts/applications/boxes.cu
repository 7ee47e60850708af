// The kernels of every example begin with this: one launch updates the cells of several boxes.
//
// A thread has a strip: groups of N cells that lie side by side along the last axis, one group
// behind the other along the first. Groups are counted from the first owned cell of a row, so that
// they are aligned and move in one piece; where a box begins or ends inside of a group, the rest of
// the group is read and never written. A block is `1 << lanes` groups wide, and as many lines deep
// as it has threads for: the lines next to each other meet the same cells in its cache.

struct Box {
    int blocks; // of threads up to the end of this box
    int lanes;
    int tiles;  // blocks side by side
    int rows;   // cells along the middle axis; 1 where there is none
    int depth;  // cells along the first axis
    int march;  // of these, as many at most in a strip
    int first;  // where in the field its first group is
    int skip;   // cells of this group that are before the box
    int end;    // cells of a row from the begin of its first group to the end of the box
};

// An argument of the launch, written by boxes.py: to look it up in memory would cost small boxes as
// much time as their cells.
struct Boxes {
    int plane, row; // how far apart neighbors along the first axes of the field are
    Box at[6];
};

struct Strip {
    int cell;       // the first of the first group
    int count;      // groups; 0 where the thread has none
    int begin, end; // the cells of each group that are in the box
};

template <int N> static __device__ Strip my_strip(const Boxes &boxes)
{
    const Box *box = boxes.at;
    int block = blockIdx.x, before = 0;
    for (; block >= box->blocks; ++box)
        before = box->blocks;
    block -= before;
    int lane = threadIdx.x & ((1 << box->lanes) - 1), line = threadIdx.x >> box->lanes;
    int across = ((block % box->tiles << box->lanes) + lane) * N;
    line += block / box->tiles * (blockDim.x >> box->lanes);
    int along = line / box->rows * box->march, left = box->depth - along;
    Strip mine = {0, 0, box->skip - across, box->end - across};
    mine.begin = mine.begin > 0 ? mine.begin : 0;
    mine.end = mine.end < N ? mine.end : N;
    if (left > 0 && mine.begin < mine.end) {
        mine.count = left < box->march ? left : box->march;
        mine.cell = box->first + along * boxes.plane + line % box->rows * boxes.row + across;
    }
    return mine;
}

// As many cells as move in one piece.
template <class Cell> struct alignas(16) Group {
    static const int N = 16 / sizeof(Cell);
    Cell at[N];
};

template <class Cell> static __device__ Group<Cell> load(const Cell *cells)
{
    return *reinterpret_cast<const Group<Cell> *>(cells);
}

template <class Cell> static __device__ void store(Cell *cells, Group<Cell> group, Strip mine)
{
    const int N = Group<Cell>::N;
    if (mine.end - mine.begin == N) {
        *reinterpret_cast<Group<Cell> *>(cells) = group;
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (mine.begin <= i && i < mine.end)
            cells[i] = group.at[i];
}
