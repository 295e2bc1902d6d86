"""Pipeline parallelism: schedules as data, their simulator, and the executor that runs them on any callables."""
