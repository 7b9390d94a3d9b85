// SPDX-License-Identifier: Apache-2.0
// C's complex functions that numpy imports from ucrtbase.dll. Wine 8's library has their names but
// not the functions; Windows has them.
#include <complex>

// Microsoft's C passes complex numbers as structures of two members; its long double is a double.
struct Float {
  float real, imaginary;
};
struct Double {
  double real, imaginary;
};

static std::complex<float> value(Float z) { return {z.real, z.imaginary}; }
static std::complex<double> value(Double z) { return {z.real, z.imaginary}; }
static Float passed(std::complex<float> z) { return {z.real(), z.imag()}; }
static Double passed(std::complex<double> z) { return {z.real(), z.imag()}; }
static float passed(float x) { return x; }
static double passed(double x) { return x; }

#define EXPORTED extern "C" __declspec(dllexport)
// A function of one complex number, for each type: its result is F for float, and D for double and
// long double.
#define FUNCTION(name, function, F, D)                               \
  EXPORTED F name##f(Float z) { return passed(function(value(z))); } \
  EXPORTED D name(Double z) { return passed(function(value(z))); }   \
  EXPORTED D name##l(Double z) { return passed(function(value(z))); }

FUNCTION(cabs, std::abs, float, double)
FUNCTION(carg, std::arg, float, double)
FUNCTION(cimag, std::imag, float, double)
FUNCTION(creal, std::real, float, double)
FUNCTION(ccos, std::cos, Float, Double)
FUNCTION(ccosh, std::cosh, Float, Double)
FUNCTION(cexp, std::exp, Float, Double)
FUNCTION(csin, std::sin, Float, Double)
FUNCTION(csinh, std::sinh, Float, Double)
FUNCTION(ctan, std::tan, Float, Double)
FUNCTION(ctanh, std::tanh, Float, Double)

EXPORTED Float cpowf(Float a, Float b) { return passed(std::pow(value(a), value(b))); }
EXPORTED Double cpow(Double a, Double b) { return passed(std::pow(value(a), value(b))); }
EXPORTED Double cpowl(Double a, Double b) { return passed(std::pow(value(a), value(b))); }
