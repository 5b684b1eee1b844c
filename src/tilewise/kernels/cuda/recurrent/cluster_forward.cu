// All steps of one layer in all its directions. Grid: a cluster for each SLICE batch rows of each direction.
//
// ``gates`` (directions, steps, batch, GATES x HIDDEN) holds the input's part of each gate. ``states`` (steps, batch,
// directions x HIDDEN) has rows ``row`` numbers apart. Where there are two directions, the second one runs backwards in
// time; where there is one, it does so if ``backwards``.

extern "C" __global__ void BOUNDS cluster_forward(
    Real* gates, const Real* weights, const Real* weights_back, const Real* bias, const Real* bias_back, const Real* first,
    const Real* first_cell, Real* states, float* cells, Real* part, Real* last, Real* last_cell, i64 steps, i64 batch,
    i64 row, i64 backwards, i64 keep) {
  const Part at = part_of(batch);
  const i64 rows = at.number * steps * batch + at.row0, ends = (at.number * batch + at.row0) * HIDDEN;
  Slice u;
  run_steps<false>(
      memory(), u,
      {gates + rows * GATES * HIDDEN, at.number ? weights_back : weights, at.number ? bias_back : bias, first + ends,
       first_cell + ends, states + at.row0 * row + at.number * HIDDEN, cells + rows * HIDDEN, part + rows * HIDDEN,
       last + ends, last_cell + ends, steps, batch, row, at.rows, at.number ? true : backwards != 0, keep != 0});
}
