// Functions of the operators, written for a number and for 16 of them: included once in namespace numbers and once in
// vectors, as what is compiled for some instructions cannot be inlined where they are not. No branch, so that loops vectorise.

// e^x for x from -87 to 88, to 1 ulp or so; NaN for NaN.
template <class W>
HYBRIDPAR_INLINE W exponential_within(W x) {
  const W shift = 12582912.0f + 127.0f;  // 1.5 * 2^23, where the fraction drops out, and the exponent's bias
  const W shifted = multiply_add(x, W(1.44269504088896341f), shift);
  const W n = shifted - shift;
  W r = multiply_add(n, W(-0.693359375f), x);  // ln 2 in two parts: exact
  r = multiply_add(n, W(2.12194440e-4f), r);
  W p = 1.381454058e-3f;  // what is left of the series, fitted: relative error 3e-9
  p = multiply_add(p, r, W(8.368745446e-3f));
  p = multiply_add(p, r, W(4.166838899e-2f));
  p = multiply_add(p, r, W(1.666652113e-1f));
  p = multiply_add(p, r, W(4.999999404e-1f));
  p = multiply_add(p, r * r, r) + W(1.0f);
  return p * power_of_two(shifted);
}

// e^x where x is at most 0, or at most 88: 0 below -87.
template <class W>
HYBRIDPAR_INLINE W exponential(W x) { return zero_below(x, W(-87), exponential_within(x)); }

template <class W>
struct Sigmoid {
  W value, rest;  // 1 / (1 + e^-x) and 1 less that, which no cancellation makes inexact
};

template <class W>
HYBRIDPAR_INLINE Sigmoid<W> sigmoid(W x) {
  const W within = at_least(at_most(x, W(80)), W(-80));  // beyond, nothing changes, and e^-x stays a normal number
  const W power = exponential_within(-within);
  const W value = W(1) / (W(1) + power);
  return {value, value * power};
}
