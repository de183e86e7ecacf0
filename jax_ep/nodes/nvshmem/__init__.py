"""Transport `nvshmem`: rails over NVSHMEM."""
