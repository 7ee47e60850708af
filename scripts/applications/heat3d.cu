// Compiled without fused multiply-add: the results are NumPy's to the last bit.
typedef Group<double> Cells;

// A strip goes through the planes: what it has read of the next two stays in registers. Where
// `wrapped` is not 0 but the cells of a row, its ends are each other's neighbors.
extern "C" __global__ void __launch_bounds__(256, 4)
    spread(const double *u, double *v, const __grid_constant__ Boxes boxes, double keep,
           double share, int wrapped)
{
    Strip mine = my_strip<Cells::N>(boxes);
    if (!mine.count)
        return;
    int c = mine.cell, plane = boxes.plane, row = boxes.row;
    // Which cell of the group is the last that has an eastern neighbor outside, and where both are.
    int last = Cells::N - 1, west_at = -1, east_at = Cells::N;
    if (wrapped) {
        int first = c % row - 1;
        if (first == 0)
            west_at += wrapped;
        if (wrapped - first <= Cells::N) {
            last = wrapped - first - 1;
            east_at = last + 1 - wrapped;
        }
    }
    Cells below = load(u + c - plane), here = load(u + c), above = load(u + c + plane);
#pragma unroll 4
    for (int left = mine.count; left; --left, c += plane) {
        Cells ahead = left > 1 ? load(u + c + 2 * plane) : above, next;
        Cells front = load(u + c - row), back = load(u + c + row);
        double west = u[c + west_at], east = u[c + east_at];
#pragma unroll
        for (int i = 0; i < Cells::N; ++i) {
            double before = i ? here.at[i - 1] : west;
            double after = i < Cells::N - 1 && i != last ? here.at[i + 1] : east;
            double sum = below.at[i] + above.at[i] + front.at[i] + back.at[i] + before + after;
            next.at[i] = share * sum + keep * here.at[i];
        }
        store(v + c, next, mine);
        below = here;
        here = above;
        above = ahead;
    }
}
