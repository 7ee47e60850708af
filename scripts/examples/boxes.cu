// The kernels of every example begin with this: one launch updates the cells of several boxes.
//
// Its thread t has the t-th cell of all boxes, row by row. A box is four integers: how many cells
// there are up to its end, its extents along the last two axes, and where in the field its first
// cell is. `plane` and `row` are how far apart neighbors along the first axes of the field are.

static __device__ int my_cell(const int *boxes, int cells, int plane, int row)
{
    int place = blockIdx.x * blockDim.x + threadIdx.x;
    if (place >= cells)
        return -1;
    int before = 0;
    while (place >= boxes[0]) {
        before = boxes[0];
        boxes += 4;
    }
    unsigned cell = place - before, rows = boxes[1], columns = boxes[2];
    unsigned column = cell % columns, line = cell / columns;
    return boxes[3] + line / rows * plane + line % rows * row + column;
}
