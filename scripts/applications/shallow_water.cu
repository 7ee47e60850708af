// Compiled without fused multiply-add: the results are NumPy's to the last bit.
struct Water {
    double h, x, y; // the depth, and the momentum along x and y
};

static __device__ Water operator+(Water a, Water b) { return {a.h + b.h, a.x + b.x, a.y + b.y}; }
static __device__ Water operator-(Water a, Water b) { return {a.h - b.h, a.x - b.x, a.y - b.y}; }
static __device__ Water operator*(double s, Water a) { return {s * a.h, s * a.x, s * a.y}; }

static __device__ Water flux_x(Water w)
{
    return {w.x, w.x * w.x / w.h + 0.5 * w.h * w.h, w.x * w.y / w.h};
}

static __device__ Water flux_y(Water w)
{
    return {w.y, w.x * w.y / w.h, w.y * w.y / w.h + 0.5 * w.h * w.h};
}

// Half a step later, where four cells meet: a b above c d.
static __device__ Water corner(Water a, Water b, Water c, Water d, double quarter)
{
    Water across = (flux_x(b) - flux_x(a)) + (flux_x(d) - flux_x(c));
    Water along = (flux_y(c) - flux_y(a)) + (flux_y(d) - flux_y(b));
    return 0.25 * ((a + b) + (c + d)) - quarter * (across + along);
}

extern "C" __global__ void flow(const double *h, const double *x, const double *y, double *new_h,
                                double *new_x, double *new_y,
                                const __grid_constant__ Boxes boxes, double ratio)
{
    Strip mine = my_strip<1>(boxes); // of one cell
    if (!mine.count)
        return;
    int centre = mine.cell;
    Water w[3][3];
    for (int i = 0; i < 3; ++i)
        for (int j = 0; j < 3; ++j) {
            int c = centre + (i - 1) * boxes.plane + j - 1;
            w[i][j] = {h[c], x[c], y[c]};
        }
    double quarter = 0.25 * ratio;
    Water a = corner(w[0][0], w[0][1], w[1][0], w[1][1], quarter);
    Water b = corner(w[0][1], w[0][2], w[1][1], w[1][2], quarter);
    Water c = corner(w[1][0], w[1][1], w[2][0], w[2][1], quarter);
    Water d = corner(w[1][1], w[1][2], w[2][1], w[2][2], quarter);
    Water across = (flux_x(b) - flux_x(a)) + (flux_x(d) - flux_x(c));
    Water along = (flux_y(c) - flux_y(a)) + (flux_y(d) - flux_y(b));
    Water now = w[1][1] - 0.5 * ratio * (across + along);
    new_h[centre] = now.h;
    new_x[centre] = now.x;
    new_y[centre] = now.y;
}
