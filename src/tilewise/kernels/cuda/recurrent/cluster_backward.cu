// The gradients of all steps of one layer in all its directions, from the last step to the first. Grid as cluster_forward.
//
// ``changes`` (directions, steps, batch, GATES x HIDDEN) and for a GRU ``own_changes`` (directions, steps, batch, HIDDEN) are
// written. ``grad`` (steps, batch, directions x HIDDEN) has rows ``grad_row`` numbers apart.

extern "C" __global__ void BOUNDS cluster_backward(
    const Real* gates, const Real* weights, const Real* weights_back, const Real* states, const float* cells,
    const Real* part, const Real* first, const Real* first_cell, const Real* grad, const Real* grad_last,
    const Real* grad_last_cell, Real* changes, Real* own_changes, Real* grad_first, Real* grad_first_cell, i64 steps,
    i64 batch, i64 row, i64 grad_row, i64 backwards) {
  const Part at = part_of(batch);
  const i64 rows = at.number * steps * batch + at.row0, ends = (at.number * batch + at.row0) * HIDDEN;
  Slice u;
  run_back_steps<false>(
      memory(), u,
      {gates + rows * GATES * HIDDEN, at.number ? weights_back : weights, states + at.row0 * row + at.number * HIDDEN,
       cells + rows * HIDDEN, part + rows * HIDDEN, first + ends, first_cell + ends,
       grad + at.row0 * grad_row + at.number * HIDDEN, offset(grad_last, ends), offset(grad_last_cell, ends),
       changes + rows * GATES * HIDDEN, own_changes + rows * HIDDEN, grad_first + ends, grad_first_cell + ends, steps, batch,
       row, grad_row, at.rows, at.number ? true : backwards != 0});
}
