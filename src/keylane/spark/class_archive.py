"""An archive of Spark's loaded classes, which halves the start time of a session on this machine.

Java can write the classes that a process has loaded into an archive, and map them from there the next time. The archive
belongs to one Java and one PySpark installation, and is stored beside the latter. Without one, or if it does not fit
any more, Java loads the classes as usual. ``python -m keylane.spark.class_archive`` creates it in half a minute:
160 MB.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pyspark

from keylane.spark.java import Java, describe_java

_QUIET = "-Xlog:disable -Xlog:all=error:stderr"
_TRAINING_SECONDS_MAX = 300.0

_TRAIN = """
import sys, time
from pyspark import SparkContext
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, InputPartition, SimpleDataSourceStreamReader
from keylane.spark.spark_session import session

class Numbers(DataSource):
    @classmethod
    def name(cls): return "numbers"
    def schema(self): return "n long"
    def simpleStreamReader(self, schema): return Reader()

class Reader(SimpleDataSourceStreamReader):
    def initialOffset(self): return {"at": 0}
    def read(self, start): return iter([(start["at"],)]), {"at": start["at"] + 1}
    def readBetweenOffsets(self, start, end): return iter([])

spark = session("local[2]", "training", spark_driver_extraJavaOptions=sys.argv[1])
spark.dataSource.register(Numbers)
query = spark.readStream.format("numbers").load().writeStream.format("noop").start()
until = time.monotonic() + 60
while len(query.recentProgress) < 3 and query.isActive and time.monotonic() < until: time.sleep(0.1)
query.stop()
spark.range(1000).groupBy((F.col("id") % 7).alias("k")).count().collect()
java = SparkContext._gateway.proc
spark.stop()
SparkContext._gateway.shutdown()
java.stdin.close()
sys.exit(java.wait())  # it writes the archive when it ends
"""


def archive(java: Java) -> Path:
    """Return the path of the archive for this Java, if there is one."""
    mark = hashlib.sha256(f"{pyspark.__version__} {java.path} {java.banner}".encode()).hexdigest()[:12]
    return Path(pyspark.__file__).parent / f"keylane-classes-{mark}.jsa"


def java_options(java: Java) -> str:
    """Return the Java options that use the archive."""
    found = archive(java)
    return _using(found) if found.exists() else ""


def make(java: Java) -> Path | None:
    """Create the archive unless it exists; None if this Java or this folder does not support it."""
    found = archive(java)
    if found.exists():
        return found
    new = found.with_name(f"{found.name}.{os.getpid()}")
    try:
        _train(f"-XX:ArchiveClassesAtExit={new} {_QUIET}")
        _train(_using(new))  # Java does not report an incomplete archive: it crashes
        new.replace(found)
    except (OSError, subprocess.SubprocessError):
        return None
    finally:
        new.unlink(missing_ok=True)
    return found


def _using(found: Path) -> str:
    return f"-XX:SharedArchiveFile={found} -Xshare:auto {_QUIET}"


def _train(options: str) -> None:
    """Run a session that loads the classes Keylane uses, in a Java with these options."""
    subprocess.run(  # noqa: S603 - this Python
        [sys.executable, "-c", _TRAIN, options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_TRAINING_SECONDS_MAX,
        check=True,
    )


if __name__ == "__main__":
    made = make(describe_java())
    print(  # noqa: T201
        f"Spark's classes are archived in {made}"
        if made
        else "this Java cannot archive classes; Spark starts more slowly"
    )
