// Compiled without fused multiply-add: the results are NumPy's to the last bit.
extern "C" __global__ void spread(const double *u, double *v, const int *boxes, int cells,
                                  int plane, int row, double keep, double share)
{
    int c = my_cell(boxes, cells, plane, row);
    if (c >= 0) {
        double sum = u[c - plane] + u[c + plane] + u[c - row] + u[c + row] + u[c - 1] + u[c + 1];
        v[c] = share * sum + keep * u[c];
    }
}
