"""PyTorch tensors as fields, ordered on PyTorch's stream: nothing is copied or wrapped.

    mpirun -n 4 python -m mpi4py scripts/examples/06_torch.py

The grid of ranks cuts the last two axes; images and channels travel whole.
"""

import torch
from mpi4py import MPI

import mpishare

N = 32  # cells per rank along each axis of the images

with mpishare.Node() as node:
    world = MPI.COMM_WORLD
    cart = world.Create_cart(MPI.Compute_dims(world.size, 2), periods=[True, True])
    place = f"cuda:{node.device.ordinal}" if node.device else "cpu"
    # A batch of 2 images with 3 channels; the grid cuts the last two axes.
    images = torch.zeros((2, 3, N + 2, N + 2), device=place, dtype=torch.float64)
    halo = mpishare.HaloExchange(cart, images, width=1, corners=True, axes=(-2, -1), node=node)

    rows, columns = (N * c + torch.arange(N, device=place) for c in cart.coords)
    images[halo.owned] = (1000.0 * rows)[:, None] + columns[None, :]
    halo.exchange(images)  # on torch.cuda.current_stream()

    # A convolution of each image as if it were whole: the ghosts are its neighbors' pixels.
    mean = torch.nn.functional.avg_pool2d(images, kernel_size=3, stride=1)
    right = images[halo.owned].clone()
    height, width = (N * dim for dim in cart.dims)
    # A mean of nine pixels of a slope is the pixel itself, but where the torus closes.
    for axis, cells, extent, slope in ((2, rows, height, 1000.0), (3, columns, width, 1.0)):
        jump = (cells == 0).double() - (cells == extent - 1).double()
        right += (slope * extent / 3 * jump).reshape([-1 if n == axis else 1 for n in range(4)])
    error = cart.allreduce(float((mean - right).abs().max()), MPI.MAX)
    halo.close()
    if error > 1e-6:
        raise SystemExit(f"WRONG: off by {error}")
    if cart.rank == 0:
        print(f"{cart.dims} ranks on {images.device.type}, error {error:.0e}: right")
