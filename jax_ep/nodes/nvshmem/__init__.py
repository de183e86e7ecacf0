"""Transport `nvshmem`: rails over NVSHMEM, imported on demand."""
