// Filters' gradients as the sum over shares, in order, from workspace into the result.

extern "C" __global__ void BOUNDS depthwise_sum(const float* __restrict__ partial, Result* __restrict__ w, i64 elements,
                                                i64 shares, i64 rows, i64 columns, i64 w_channel, i64 w_row,
                                                i64 w_column) {
  const i64 i = blockIdx.x * (i64)THREADS + threadIdx.x;
  if (i >= elements) return;
  float sum = 0.f;
  for (i64 share = 0; share < shares; ++share) sum += partial[share * elements + i];
  const unsigned place = (unsigned)i, row = place / (unsigned)columns, channel = row / (unsigned)rows;
  w += channel * w_channel + (row - channel * (unsigned)rows) * w_row + (place - row * (unsigned)columns) * w_column;
  put<false>(true, w, sum);
}
