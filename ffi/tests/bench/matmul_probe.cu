// Times the grouped matmul with swapped operands (layer/matmul/hopper/hopper_swapped.cuh) beside
// CUTLASS's.
//
//   matmul_probe [seconds of random checks before] [folder of libcublas] [gradients]
//
// "gradients": of rows, which are matmuls with transposed weights.

#include <cstdlib>
#include <string>

#include "tests/bench/matmul_probe.h"
#include "tests/unit/matmul_swapped_cases.cuh"

int main(int argc, char** argv) {
  using namespace jax_ep::matmul;
  TestSwapped(argc > 1 ? std::atof(argv[1]) : 5, 1);
  const bool is_gradient = argc > 3 && argv[3] == std::string("gradients");
  TimeMatmuls(argc > 2 ? argv[2] : "",
              is_gradient ? MatmulForm::kTransposedWeights : MatmulForm::kWeights);
}
