typedef long long whole;

// How many points are in each cell.
template <typename Cell> __global__ void count_cells(whole n, const Cell *cells, unsigned long long *counts) {
    whole i = blockIdx.x * (whole)blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(counts + cells[i], 1ull);
}

// The neighbours of points, by the cells around each one: their count, or a list for each.
//
// Rows of `grid`: the lower corner, extents of a cell, cells along each axis, and the periods of a box or 0.
extern "C" __global__ void neighbours(whole n, int axes, double radius, bool lists, whole total,
                                      const double *points, const whole *order, const whole *starts,
                                      const double *grid, const whole *begins, whole *out) {
    whole i = blockIdx.x * (whole)blockDim.x + threadIdx.x;
    if (i >= n) return;
    whole first[3] = {0, 0, 0}, last[3] = {0, 0, 0}, count[3] = {1, 1, 1}, found = 0;
    const double *size = grid + axes, *cells = size + axes, *box = cells + axes;
    for (int a = 0; a < axes; a++) {
        count[a] = (whole)cells[a];
        double place = (points[i * axes + a] - grid[a]) / size[a];
        if (box[a] > 0) place -= floor(place / cells[a]) * cells[a];
        whole cell = min((whole)floor(place), count[a] - 1);
        first[a] = cell - 1, last[a] = cell + 1;
        if (box[a] == 0) first[a] = max(first[a], 0ll), last[a] = min(last[a], count[a] - 1);
        // All cells of a small box, once each.
        else if (count[a] < 3) first[a] = 0, last[a] = count[a] - 1;
    }
    for (whole x = first[0]; x <= last[0]; x++)
        for (whole y = first[1]; y <= last[1]; y++)
            for (whole z = first[2]; z <= last[2]; z++) {
                whole at[3] = {x, y, z}, cell = 0;
                for (int a = 0; a < 3; a++) cell = cell * count[a] + (at[a] + count[a]) % count[a];
                for (whole k = starts[cell]; k < starts[cell + 1]; k++) {
                    whole j = order[k];
                    double square = 0;
                    for (int a = 0; a < axes; a++) {
                        double step = points[i * axes + a] - points[j * axes + a];
                        if (box[a] > 0) step -= rint(step / box[a]) * box[a];
                        square += step * step;
                    }
                    if (j == i || square > radius * radius) continue;
                    if (lists) {
                        whole *list = out + begins[i], place = found;
                        for (; place > 0 && list[place - 1] > j; place--) list[place] = list[place - 1];
                        list[place] = j;
                    }
                    found++;
                }
            }
    if (!lists) out[i] = found;
}
